"""What must stay float32 stays float32, bit for bit, through every cast; initial values follow the specification."""

import math

import pytest
import torch

from k3 import K3Config, K3Model
from suites import proxies
from suites.models import build
from suites.oracle_weights import FP32_NAMES

CASTS = {
    "to": lambda model: model.to(torch.bfloat16), "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(), "built": lambda _: build(proxies.ODD, odd_float32(), torch.bfloat16),
}  # fmt: skip


def odd_float32():
    """The odd proxy's weights as a file would hold them: values that bfloat16 cannot represent."""
    return {name: tensor.float() for name, tensor in proxies.odd().items()}


@pytest.mark.parametrize("cast", CASTS)
def test_pinned_tensors_survive(cast):
    """A_log, dt_bias, convolutions, o_norm and the correction bias keep dtype and bits; everything else is narrowed."""
    before = {n: t.clone() for n, t in build(proxies.ODD, odd_float32()).state_dict().items()}
    after = CASTS[cast](build(proxies.ODD, odd_float32())).state_dict()
    pinned = [name for name in after if name.endswith(FP32_NAMES)]
    assert len(pinned) == 4 * 6 + 5  # four KDA layers of six tensors, five routers
    for name in pinned:
        assert after[name].dtype == torch.float32 and torch.equal(after[name], before[name]), name
    assert {t.dtype for n, t in after.items() if n not in pinned} == {
        torch.float16 if cast == "half" else torch.bfloat16
    }


def test_double_is_double():
    """`.double()` widens everything: nothing is left in float32."""
    assert {t.dtype for t in build(proxies.ODD, odd_float32()).double().state_dict().values()} == {torch.float64}


def test_gradients_of_pinned_tensors_are_float32():
    """In a bfloat16 model the pinned parameters receive float32 gradients, and the rest bfloat16 ones."""
    model = build(proxies.ODD, odd_float32(), torch.bfloat16)
    ids, labels = proxies.tokens(9)
    out = model(ids, labels=labels)
    assert out["logits"].dtype == torch.bfloat16 and out["loss"].dtype == torch.float32
    out["loss"].backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == (torch.float32 if name.endswith(FP32_NAMES) else torch.bfloat16), name


def test_initial_values():
    """A fresh model: no bias, norms 1, pseudo-queries 0, A_log 0, pad row 0, weights N(0, 0.02), dt in [1e-3, 0.1]."""
    torch.manual_seed(0)
    config = K3Config.from_hf(proxies.ODD)
    state = K3Model(config, dtype=torch.float32).state_dict()
    for name, tensor in state.items():
        if name.endswith(("_res_proj.weight", "A_log", "e_score_correction_bias")):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("dt_bias"):
            assert (
                0.99e-3
                < torch.nn.functional.softplus(tensor).min()
                <= torch.nn.functional.softplus(tensor).max()
                < 0.101
            )
        elif "conv1d" not in name:
            assert abs(float(tensor.std()) / 0.02 - 1) < 0.35, name
    assert not state["language_model.model.embed_tokens.weight"][config.pad_token_id].any()
    assert not [name for name in state if name.endswith(".bias")]


def test_trains():
    """A few steps on one batch lower the loss from that of an even guess, the log of the vocabulary, in float32."""
    torch.manual_seed(0)
    model = K3Model(K3Config.from_hf(proxies.ODD), dtype=torch.float32)
    ids, labels = proxies.tokens(33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=labels)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(proxies.ODD_TEXT["vocab_size"]), rel=0.02)
    assert 0 < losses[-1] < 0.9 * losses[0]
