"""The handed golden vectors (suites/golden/): cases, configs, weights, expected values and how closely to match."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

FOLDER = Path(__file__).parent / "golden"
LENGTHS = {"readme2": (1, 7, 64, 130), "hybrid5": (1, 7, 64, 130), "mxfp4_3": (1, 7, 64, 130), "par6": (64,)}
GRADIENT_LENGTHS = {"readme2": (7, 64), "hybrid5": (7, 64), "mxfp4_3": (7,), "par6": (64,)}
PREFIX = "language_model.model.layers."


class Golden:
    """One case; `expected(dtype, T)` reads values by their short keys, straight from the file."""

    def __init__(self, case: str):
        self.case = case
        self.config_path, self.weights_path = FOLDER / f"{case}.json", FOLDER / f"{case}.weights.safetensors"
        self.values_path = FOLDER / f"{case}.safetensors"

    @property
    def files(self) -> tuple[Path, ...]:
        return self.config_path, self.weights_path, self.values_path

    @cached_property
    def hf(self) -> dict:
        """The public nested config, without the `_golden` notes."""
        return {key: value for key, value in self.notes.items() if key != "_golden"}

    @cached_property
    def notes(self) -> dict:
        return json.loads(self.config_path.read_text())

    @property
    def text(self) -> dict:
        return self.hf["text_config"]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        with safe_open(str(self.values_path), "pt") as file:
            return tuple(file.keys())

    def get(self, key: str) -> torch.Tensor:
        with safe_open(str(self.values_path), "pt") as file:
            return file.get_tensor(key)

    def inputs(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get(f"in.T{length}.input_ids"), self.get(f"in.T{length}.labels")

    def expected(self, dtype: str, length: int, part: str = "") -> dict[str, torch.Tensor]:
        """Values below `<dtype>.T<length>.<part>`, keyed by the rest of the name."""
        start = f"{dtype}.T{length}.{part}"
        return {key.removeprefix(start): self.get(key) for key in self.keys if key.startswith(start)}

    def gradients(self, length: int) -> dict[str, torch.Tensor]:
        return self.expected("f32", length, "grad.")

    def detail(self, kind: str) -> tuple[int, dict[str, torch.Tensor]]:
        """Layer index and the T=7 intermediates of the first layer of `kind` (kda, mla, moe or dense)."""
        return self.notes["_golden"]["detail_layers"][kind], self.expected("f32", 7, f"detail.{kind}.")

    def bf16_mean(self, length: int) -> float:
        """Mean |logit error| of the vendor's own bfloat16 run against float64."""
        return self.notes["_golden"]["cross_checks_max_abs"][f"T{length}"]["bf16"]["vs_numpy_f64_mean"]

    def routing_flips(self, length: int) -> int:
        """Tokens whose expert set differs between the vendor's bfloat16 and float32 runs."""
        checks = self.notes["_golden"]["cross_checks_max_abs"][f"T{length}"]["bf16"]
        return checks["router_token_sets_different_from_f32"]


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float, what: str) -> float:
    """Assert max |found - wanted| <= atol over equal shapes and return it; `what` names the value in the failure."""
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    difference = float((found.detach().double() - wanted.double()).abs().max())
    assert difference <= atol, f"{what}: max difference {difference:.3e} is above {atol:.0e}"
    return difference


def relative(found: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> float:
    """Assert ||found - wanted|| <= limit * ||wanted|| over equal shapes and return the ratio."""
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    found, wanted = found.detach().double(), wanted.double()
    ratio = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
    assert ratio <= limit, f"{what}: relative L2 difference {ratio:.3e} is above {limit:.0e}"
    return ratio
