"""What the GPU suites share: seeds on the device, exact float32 products, and relative limits told all at once."""

from __future__ import annotations

import pytest
import torch

on_gpu = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32"),
]


@pytest.fixture
def exact_float32():
    """Float32 products in float32: TF32 keeps three digits and would hide what is compared."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


class Draw:
    """Seeded tensors on the GPU: `normal` in bfloat16 unless told otherwise."""

    def __init__(self, seed: int):
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape, scale=1.0, dtype=torch.bfloat16) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=self.generator, device="cuda")).to(dtype)

    def integers(self, high: int, *shape) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device="cuda")

    def experts(self, tokens: int, num_experts: int, k: int) -> torch.Tensor:
        """k different experts for each token, in no order: [tokens, k]."""
        scores = torch.rand(tokens, num_experts, generator=self.generator, device="cuda")
        return scores.topk(k, sorted=False).indices


def ratio(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted|| in float64; NaN stays NaN and meets no limit."""
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def within(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], limits: dict[str, float] | float) -> None:
    """Assert every relative L2 difference is within its limit; the failure and the captured output name them all."""
    found = {name: ratio(*pair) for name, pair in pairs.items()}
    print({name: f"{value:.1e}" for name, value in found.items()})
    allowed = limits if isinstance(limits, dict) else dict.fromkeys(found, limits)
    bad = {name: f"{value:.2e} > {allowed[name]:.0e}" for name, value in found.items() if not value <= allowed[name]}
    assert not bad, f"{bad} of {found}"


def leaves(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Fresh leaves with gradients, converted to `dtype` where one is given."""
    return {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}


def gradients(outputs, inputs: dict[str, torch.Tensor], upstream) -> dict[str, torch.Tensor]:
    """d<name> for every input, given the gradient of every output."""
    found = torch.autograd.grad(outputs, list(inputs.values()), upstream)
    return {f"d{name}": gradient for name, gradient in zip(inputs, found, strict=True)}


def paired(found: dict, wanted: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {name: (found[name], wanted[name]) for name in wanted}
