"""What must stay float32 stays so, bit for bit; what is float64 is float64 throughout."""

import copy

import pytest
import torch

from k3 import Cache, K3Model
from tests.k3.support import ids, lively, tiny

PINNED = (
    "A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight",
    "e_score_correction_bias",
)  # fmt: skip
CASTS = {
    "to": lambda m: m.to(torch.bfloat16), "bfloat16": lambda m: m.bfloat16(), "half": lambda m: m.half(),
    "type": lambda m: m.type(torch.bfloat16), "copy": lambda m: copy.deepcopy(m).to(torch.bfloat16),
    "and back": lambda m: m.bfloat16().half(), "from double": lambda m: m.double().bfloat16(),
    "submodule by submodule": lambda m: [c.bfloat16() for c in m.modules()] and m,
}  # fmt: skip


@pytest.mark.parametrize("cast", CASTS)
def test_pinned(cast):
    """No cast narrows or rounds a pinned parameter or buffer, and every other tensor is narrowed."""
    model = lively(tiny(), torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = CASTS[cast](model).state_dict()
    for name, tensor in after.items():
        if name.endswith(PINNED):
            assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
        else:
            assert tensor.dtype in (torch.bfloat16, torch.float16), name


def test_pinned_gradients():
    """A cast after backward keeps the pinned gradients in float32 too."""
    model = lively(tiny(), torch.float32)
    model(ids(1, 5), labels=ids(1, 5))["loss"].backward()
    before = model.decoder.layers["0"].self_attn.A_log.grad.clone()
    after = model.bfloat16().decoder.layers["0"].self_attn.A_log.grad
    assert after.dtype == torch.float32 and torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_built_in_dtype(dtype):
    """A model built in a dtype has it everywhere but in the pinned tensors, which are at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    for name, tensor in K3Model(tiny(), dtype=dtype).state_dict().items():
        assert tensor.dtype == (wide if name.endswith(PINNED) else dtype), name


def test_float64_throughout():
    """A float64 forward and backward meets no float32 tensor: every module's output and every gradient is float64."""
    model, seen = lively(tiny()), []

    def keep(_module, _args, output):
        outputs = output if isinstance(output, tuple | list) else [output]
        seen.extend(t for o in outputs for t in (o if isinstance(o, tuple | list) else [o]))

    for module in model.modules():
        module.register_forward_hook(keep)
    cache = Cache()
    out = model(ids(1, 70), labels=ids(1, 70), cache=cache)
    out["loss"].backward()
    seen += [out["loss"], cache.kda[0].S, *(p.grad for p in model.parameters() if p.grad is not None)]
    floating = [t for t in seen if isinstance(t, torch.Tensor) and t.is_floating_point()]
    assert len(floating) > 40 and {t.dtype for t in floating} == {torch.float64}


def test_autocast():
    """Under autocast the router, the recurrence and the mix stay float32: same experts, and a finite loss."""
    model, x, chosen = lively(tiny(), torch.float32), ids(2, 9), []
    gate = model.decoder.layers["1"].block_sparse_moe.gate
    gate.register_forward_hook(lambda m, a, o: chosen.append((a[0], o[1].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x)["loss"]
    loss.backward()
    assert loss.dtype == chosen[0][1] == torch.float32 and loss.isfinite()


def test_activation_dtype():
    """A bfloat16 model passes bfloat16 between its parts; its logits are bfloat16 and its loss float32."""
    model = lively(tiny(), torch.bfloat16)
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: seen.__setitem__(name, o))
    out = model(ids(1, 5), labels=ids(1, 5))
    assert out["logits"].dtype == torch.bfloat16 and out["loss"].dtype == torch.float32
    outputs = {n: o for n, o in seen.items() if isinstance(o, torch.Tensor)}
    assert len(outputs) > 30 and {o.dtype for o in outputs.values()} == {torch.bfloat16}
