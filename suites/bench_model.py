"""Four layers at full width on one GPU: dense KDA, two routed KDA, routed MLA; a training step, memory, decoding.

64 of the 896 experts fit beside their gradients; each token still takes 16. The peer is the same model with eager
torch operations for the mix over depth, SiTU and the experts.
"""

import gc
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from k3 import K3Config, K3Model
from k3.decode import Cache
from suites.eager import eager_operations
from suites.gpu_common import ratio
from suites.timing import DEVICE, ON_GPU, race, timed  # noqa: F401

pytestmark = timed
T = 8192 if ON_GPU else 48
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
SMALL = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
    "routed_expert_hidden_size": 32, "moe_intermediate_size": 48, "num_experts_per_token": 2, "vocab_size": 256,
    "kda_num_heads": 2, "kda_head_dim": 16, "intermediate_size": 96, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = 64 if ON_GPU else 4


def proxy() -> K3Model:
    torch.manual_seed(4)
    sizes = {} if ON_GPU else SMALL
    layers = {"num_hidden_layers": 4, "kda_layers": (1, 2, 3), "full_attention_layers": (4,)}
    return K3Model(K3Config(num_experts=EXPERTS, **layers, **sizes), device=DEVICE, dtype=DTYPE)


def batch(config: K3Config) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(1, config.vocab_size - 1, (2, 1, T), device=DEVICE))


def train_step(model: K3Model):
    ids, labels = batch(model.config)
    used = [p for name, p in model.named_parameters() if "layers.0.self_attention_res" not in name]

    def call():
        torch.autograd.grad(model(ids, labels=labels)["loss"], used)

    return call


def operations_per_token(model: K3Model) -> float:
    """Forward operations of all products a token takes part in; attention's share is its causal half."""
    config, once = model.config, 0.0
    for name, p in model.named_parameters():
        if p.ndim == 3 and ".experts." in name:
            once += 2 * p[0].numel() * config.num_experts_per_token
        elif p.ndim == 2 and "embed_tokens" not in name and "_res_proj" not in name:
            once += 2 * p.numel()
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return once + T * config.num_attention_heads * widths


def test_training_step(race, measure):  # noqa: F811
    """Forward and backward of 8192 tokens with every gradient; the floor is its products at the measured peak."""
    model = proxy()
    eager, (ids, _) = train_step(model), batch(model.config)
    with torch.no_grad(), eager_operations():
        wanted = model(ids[:, :512])["logits"]
    with torch.no_grad():
        assert ratio(model(ids[:, :512])["logits"], wanted) < 5e-2  # four layers in bfloat16, routing flips included

    def in_eager():
        with eager_operations():
            eager()

    flops = 3 * T * operations_per_token(model)
    contenders = {"k3": train_step(model), "eager AttnRes, SiTU, experts": in_eager}
    took = race(contenders, shape=f"T={T} layers=4 E={EXPERTS}", dtype=DTYPE_NAME, rounds=8, floor_flops=flops)
    if took:
        measure("tokens_per_s", "1/s", "higher", [T / took], shape=f"T={T}", dtype=DTYPE_NAME)


@pytest.mark.skipif(not ON_GPU, reason="peak memory is counted by the CUDA allocator")
@pytest.mark.parametrize("recompute", [False, True])
def test_memory(measure, recompute):
    """Peak bytes per token above weights and gradients, keeping every activation or recomputing each layer."""
    model = proxy()
    if recompute:
        for layer in model.decoder.layers.values():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    call = train_step(model)
    call()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    weights = sum(p.nbytes for p in model.parameters())
    call()
    per_token = (torch.cuda.max_memory_allocated() - 2 * weights) / T
    name = "peak_bytes_per_token.recomputed" if recompute else "peak_bytes_per_token.kept"
    print(f"{name}: {per_token:.0f} bytes")
    measure(name, "B", "lower", [per_token], shape=f"T={T}", dtype=DTYPE_NAME)


@pytest.mark.parametrize("size", [1, 64])
def test_decode_step(race, size):  # noqa: F811
    """One token for each of 1 or 64 sequences after 64 of prefill; the floor reads weights in use and moves states."""
    model, cache = proxy(), Cache()
    ids = torch.randint(1, model.config.vocab_size - 1, (size, 65), device=DEVICE)
    with torch.no_grad():
        model(ids[:, :64], cache=cache)
        touched = min(EXPERTS, size * model.config.num_experts_per_token) / EXPERTS
        moved = sum(p.nbytes * (touched if p.ndim == 3 and ".experts." in name else 1.0)
                    for name, p in model.named_parameters() if "embed_tokens" not in name)  # fmt: skip
        moved += sum(2 * state.S.nbytes for state in cache.kda.values())
        kept = dict(cache.kda), dict(cache.mla)

        def step():
            cache.kda, cache.mla = dict(kept[0]), dict(kept[1])
            model(ids[:, 64:], cache=cache)

        race({"k3": step}, shape=f"B={size} S=65 layers=4", dtype=DTYPE_NAME, rounds=20, floor_bytes=moved)
