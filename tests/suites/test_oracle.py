"""The oracle agrees with the vendor's golden vectors, so the suites may trust it where no vector exists."""

import ast
from pathlib import Path

import pytest
import torch

from suites import oracle, oracle_weights
from suites.goldens import FOLDER, GRADIENT_LENGTHS, LENGTHS, Golden, close, relative

CASES = [(case, length) for case, lengths in LENGTHS.items() for length in lengths if length < 130]
DETAILS = [(case, kind) for case in ("readme2", "hybrid5", "mxfp4_3") for kind in ("kda", "mla", "moe", "dense")]


@pytest.mark.parametrize(("case", "length"), CASES)
def test_values_match_the_vendor(case, length):
    """Logits, both losses, every layer, state, mix and routing decision equal the vendor's float32 run."""
    golden = Golden(case)
    ids, labels = golden.inputs(length)
    trace = oracle.Trace()
    logits = oracle.forward(oracle_weights.read(golden.weights_path), golden.text, ids, trace)
    close(logits, golden.get(f"f64.T{length}.logits"), 1e-10, "logits against float64")
    for key, wanted in golden.expected("f32", length).items():
        if key.startswith(("detail", "grad", "loss", "logits")) or key.endswith("gap"):
            continue
        close(trace[key].reshape(wanted.shape), wanted, 5e-4, key)
    close(oracle.loss(logits, labels)[None], golden.get(f"f32.T{length}.loss"), 1e-5, "loss")


@pytest.mark.parametrize(("case", "kind"), DETAILS)
def test_details_match_the_vendor(case, kind):
    """Every intermediate of the first layer of each kind equals the vendor's."""
    golden = Golden(case)
    trace = oracle.Trace()
    oracle.forward(oracle_weights.read(golden.weights_path), golden.text, golden.inputs(7)[0], trace)
    index, wanted = golden.detail(kind)
    assert wanted
    for key, value in wanted.items():
        close(trace[f"layer{index}.{kind}"][key].reshape(value.shape), value, 2e-4, f"{kind}.{key}")


@pytest.mark.parametrize(("case", "length"), [(c, n) for c, ns in GRADIENT_LENGTHS.items() for n in ns])
def test_gradients_match_the_vendor(case, length):
    """Every gradient the vendor's run produced equals autograd on the equations."""
    golden = Golden(case)
    _, found = oracle.gradients(oracle_weights.read(golden.weights_path), golden.text, *golden.inputs(length))
    for name, wanted in golden.gradients(length).items():
        gradient = found[name][: wanted.shape[0]]  # A_log is padded on disk
        relative(gradient, wanted, 2e-4, name)


def test_decode_matches_the_tables():
    """The oracle's MXFP4 decoder reproduces every byte at every tabulated scale."""
    from safetensors.torch import load_file

    table = load_file(FOLDER / "mxfp4.safetensors")
    for row, scale in enumerate(table["decode.scale"].tolist()):
        packed = table["decode.byte"].to(torch.uint8).reshape(16, 16)
        found = oracle_weights.decode(packed, torch.full((16, 1), scale, dtype=torch.uint8))
        assert torch.equal(found.reshape(256, 2).nan_to_num(7.0), table["decode.value_f64"][row].nan_to_num(7.0))


@pytest.mark.parametrize("case", LENGTHS)
def test_shapes_name_every_tensor(case):
    """The oracle's own list of names and shapes is exactly what the vendor's file holds."""
    golden = Golden(case)
    wanted = {name: tuple(tensor.shape) for name, tensor in oracle_weights.read(golden.weights_path).items()}
    heads = golden.text["linear_attn_config"]["num_heads"]
    wanted = {name: (heads,) if name.endswith("A_log") else shape for name, shape in wanted.items()}
    assert oracle_weights.shapes(golden.text) == wanted


def test_oracle_is_independent():
    """No oracle module imports k3, directly or by way of another suite module."""
    for name in ("oracle", "oracle_weights", "goldens"):
        tree = ast.parse((Path(oracle.__file__).parent / f"{name}.py").read_text())
        imported = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in imported if name.split(".")[0] in ("k3", "harness", "ledger")}
