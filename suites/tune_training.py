"""What a training job at full width asks its kernels for, and nothing that a peer of a benchmark would add.

`k3-harness tune suites/tune_training.py` warms this family in minutes. The step comes first, because kernels tune
themselves at the shape they meet first; the layer is small enough for every compiling worker to hold one.
"""

import pytest
import torch

from k3 import K3Config
from k3.kda import KDA
from suites import bench_model
from suites.timing import DEVICE, ON_GPU

pytestmark = pytest.mark.skipif(not ON_GPU, reason="tunes the kernels of a GPU")


def test_training_step():
    """One training step of the four layers that `suites/bench_model.py` times."""
    bench_model.train_step(bench_model.proxy())()


def test_layer():
    """One KDA layer, which launches every kernel that tunes itself, with finite gradients of all weights."""
    layer = KDA(K3Config(), 0, device=DEVICE, dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    out = layer(torch.randn(1, 2048, K3Config().hidden_size, device=DEVICE, dtype=torch.bfloat16))
    gradients = torch.autograd.grad(out, list(layer.parameters()), torch.ones_like(out))
    assert all(gradient.isfinite().all() for gradient in gradients)
