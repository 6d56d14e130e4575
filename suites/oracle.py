"""The K3 text model as equations: an independent float64 reference that never imports `k3`.

Every function is one equation of the specification, in its order, on plain tensors. Weights are a mapping from
public checkpoint names to float64 tensors (routed experts one by one, as on disk). Nothing here is fast: the delta
rule is a loop over tokens and the experts a loop over rows. Gradients come from autograd on the same equations.
`suites/oracle_weights.py` reads and draws the weights.

Notation: B batch, T tokens, D hidden, H heads, K key dim, V value dim, N = B*T rows, E experts, L latent.
"""

from __future__ import annotations

import torch

LATENT_EPS = 1e-6  # the two MLA latent norms and the q/k l2 norm; every other norm takes rms_norm_eps


class Weights:
    """The weights below one dotted prefix; `view["c"]` is the tensor named `c` or `c.weight` there."""

    def __init__(self, tensors: dict[str, torch.Tensor], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        full = self.prefix + name
        return self.tensors[full] if full in self.tensors else self.tensors[full + ".weight"]

    def below(self, name: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{name}.")


class Trace(dict):
    """What a forward pass saw on its way, by name; `forward` fills it for whoever wants to compare layers."""


def rms_norm(x, weight, eps):
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def linear(x, weight):
    return x @ weight.T


def situ(gate, up, beta, linear_beta):
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def mlp(x, w, c, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (w[name] for name in names)
    inner = situ(linear(x, gate), linear(x, up), c["activation_situ_beta"], c["activation_situ_linear_beta"])
    return linear(inner, down)


def short_conv(x, weight):
    """y[t] = silu(sum_j w[j] x[t - taps + 1 + j]): the last tap multiplies the current token. x [B, T, C]."""
    taps = weight.shape[-1]
    padded = torch.cat([x.new_zeros(x.shape[0], taps - 1, x.shape[2]), x], dim=1)
    total = sum(weight[:, 0, j] * padded[:, j : j + x.shape[1]] for j in range(taps))
    return total * torch.sigmoid(total)


def l2_norm(x):
    return x / (x.pow(2).sum(-1, keepdim=True) + LATENT_EPS).sqrt()


def delta_rule(q, k, v, log_decay, beta, state=None):
    """q, k, log_decay [B, T, H, K], v [B, T, H, V], beta [B, T, H] -> outputs [B, T, H, V], state [B, H, K, V]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        state = log_decay[:, t].exp().unsqueeze(-1) * state
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - predicted)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def kda(x, w, c, trace, at):
    """Kimi delta attention on layer-normed x [B, T, D]."""
    heads, dim = c["linear_attn_config"]["num_heads"], c["linear_attn_config"]["head_dim"]

    def split(tensor):
        return tensor.unflatten(-1, (heads, dim))

    q, k, v = (short_conv(linear(x, w[f"{n}_proj"]), w[f"{n}_conv1d"]) for n in "qkv")
    gate_logit = linear(linear(x, w["f_a_proj"]), w["f_b_proj"])
    beta_logit = linear(x, w["b_proj"])
    speed = w["A_log"][:heads].exp().unsqueeze(-1)
    lower_bound = c["linear_attn_config"]["gate_lower_bound"]
    log_decay = lower_bound * torch.sigmoid(speed * (split(gate_logit) + split(w["dt_bias"])))
    scaled_q = l2_norm(split(q)) * dim**-0.5
    core, state = delta_rule(scaled_q, l2_norm(split(k)), split(v), log_decay, torch.sigmoid(beta_logit))
    out_gate = linear(x, w["g_proj"])
    normed = rms_norm(core, w["o_norm"], c["rms_norm_eps"]) * torch.sigmoid(split(out_gate))
    out = linear(normed.flatten(-2), w["o_proj"])
    trace[f"{at}.kda_state"] = state
    trace[f"{at}.kda"] = {
        "in": x, "q": q, "k": k, "v": v, "gate_logit": gate_logit, "beta_logit": beta_logit,
        "out_gate_logit": out_gate, "log_decay": log_decay, "core": core, "normed": normed, "out": out,
    }  # fmt: skip
    return out


def mla(x, w, c, trace, at):
    """Gated multi-head latent attention without positions on layer-normed x [B, T, D]."""
    heads, content, tail = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    value_dim, rank = c["v_head_dim"], c["kv_lora_rank"]
    q_latent = rms_norm(linear(x, w["q_a_proj"]), w["q_a_layernorm"], LATENT_EPS)
    q = linear(q_latent, w["q_b_proj"]).unflatten(-1, (heads, content + tail))
    latent, shared_tail = linear(x, w["kv_a_proj_with_mqa"]).split([rank, tail], dim=-1)
    kv_latent = rms_norm(latent, w["kv_a_layernorm"], LATENT_EPS)
    key, value = linear(kv_latent, w["kv_b_proj"]).unflatten(-1, (heads, content + value_dim)).split(
        [content, value_dim], dim=-1
    )  # fmt: skip
    score = torch.einsum("bthc,bshc->bhts", q[..., :content], key)
    score = score + torch.einsum("bthc,bsc->bhts", q[..., content:], shared_tail)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weight = torch.softmax((score / (content + tail) ** 0.5).masked_fill(future, float("-inf")), dim=-1)
    mixed = torch.einsum("bhts,bshv->bthv", weight, value).flatten(-2)
    out = linear(mixed * torch.sigmoid(linear(x, w["g_proj"])), w["o_proj"])
    trace[f"{at}.mla"] = {"in": x, "q_latent": q_latent, "kv_latent": kv_latent, "out": out}
    return out


def route(x, w, c):
    """x [N, D] -> expert indices [N, k] ascending and their weights [N, k]; the bias only selects."""
    score = torch.sigmoid(linear(x, w["weight"]))
    choice = (score + w["e_score_correction_bias"]).detach()
    groups, kept = c["num_expert_group"], c["topk_group"]
    if groups > kept:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        allowed = torch.zeros(x.shape[0], groups, dtype=torch.bool).scatter(1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    index = choice.topk(c["num_experts_per_token"], dim=-1).indices.sort(dim=-1).values
    picked = score.gather(1, index)
    return index, picked / (picked.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]


def latent_moe(x, w, c, trace, at):
    """Stable latent mixture of experts on layer-normed x [B, T, D]: one norm on the combined latent."""
    rows = x.flatten(0, 1)
    index, weight = route(rows, w.below("gate"), c)
    latent = linear(rows, w["routed_expert_down_proj"])
    combined = []
    for row in range(rows.shape[0]):
        experts = [w.below(f"experts.{int(e)}") for e in index[row]]
        outputs = [mlp(latent[row], expert, c, ("w1", "w3", "w2")) for expert in experts]
        combined.append(sum(weight[row, j] * output for j, output in enumerate(outputs)))
    routed_sum = torch.stack(combined)
    routed_norm = rms_norm(routed_sum, w["routed_expert_norm"], c["rms_norm_eps"])
    routed_up = linear(routed_norm, w["routed_expert_up_proj"])
    shared = mlp(x, w.below("shared_experts"), c)
    out = routed_up.view_as(x) + shared
    trace[f"{at}.topk_idx"], trace[f"{at}.topk_weight"] = index, weight
    trace[f"{at}.moe"] = {
        "in": x, "latent": latent, "routed_sum": routed_sum, "routed_norm": routed_norm,
        "routed_up": routed_up, "shared": shared, "out": out,
    }  # fmt: skip
    return out


def mix(prefix, bank, w, name, eps):
    """Attention residual: softmax over depth, per token, of the raw snapshots and the running prefix (last)."""
    values = torch.stack([*bank, prefix], dim=-2)  # [B, T, depth, D]
    normed = values * (values.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    score = (normed * w[f"{name}_norm"] * w[f"{name}_proj"][0]).sum(-1)
    return (torch.softmax(score, dim=-1).unsqueeze(-1) * values).sum(-2)


def layer(i, prefix, bank, w, c, trace):
    """One decoder layer, i from 0; `bank` is the list of snapshots so far."""
    eps, at = c["rms_norm_eps"], f"layer{i}"
    x = mix(prefix, bank, w, "self_attention_res", eps) if bank else prefix
    trace[f"{at}.attn_mix"] = x
    block_start = i % c["attn_res_block_size"] == 0
    bank = [*bank, prefix] if block_start else bank
    attention = kda if i + 1 in c["linear_attn_config"]["kda_layers"] else mla
    a = attention(rms_norm(x, w["input_layernorm"], eps), w.below("self_attn"), c, trace, at)
    prefix = a if block_start else prefix + a
    x = mix(prefix, bank, w, "mlp_res", eps)
    trace[f"{at}.mlp_mix"] = x
    x = rms_norm(x, w["post_attention_layernorm"], eps)
    if i >= c["first_k_dense_replace"] and i % c["moe_layer_freq"] == 0:
        m = latent_moe(x, w.below("block_sparse_moe"), c, trace, at)
    else:
        m = mlp(x, w.below("mlp"), c)
        trace[f"{at}.dense"] = {"in": x, "out": m}
    trace[f"{at}.hidden"] = prefix + m
    return prefix + m, bank


def forward(tensors, text_config, ids, trace=None):
    """Logits [B, T, vocab] of token ids [B, T]; `text_config` is the public nested one, `trace` is filled if given."""
    c, trace, root = text_config, Trace() if trace is None else trace, Weights(tensors, "language_model.")
    w = root.below("model")
    h, bank = w["embed_tokens"][ids], []
    for i in range(c["num_hidden_layers"]):
        h, bank = layer(i, h, bank, w.below(f"layers.{i}"), c, trace)
    mixed = mix(h, bank, w, "output_attn_res", c["rms_norm_eps"])
    normed = rms_norm(mixed, w["norm"], c["rms_norm_eps"])
    trace |= {"output_mix": mixed, "final.norm": normed, "snapshots": torch.stack(bank, dim=-2)}
    return linear(normed, root["lm_head"])


def loss(logits, labels, mask=None):
    """Mean cross entropy over the labels that count: not -100, and weighted by `mask` [B, T] where given."""
    counted = (labels != -100).to(logits.dtype) * (1.0 if mask is None else mask.to(logits.dtype))
    log_p = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    picked = log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -(picked * counted).sum() / counted.sum().clamp_min(1.0)


def gradients(tensors, text_config, ids, labels, mask=None, trace=None):
    """Loss and its gradient by name, for every tensor that receives one; the pad row of the embedding gets none."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    value = loss(forward(leaves, text_config, ids, trace), labels, mask)
    value.backward()
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    if (pad := text_config.get("pad_token_id")) is not None:
        found["language_model.model.embed_tokens.weight"][pad] = 0
    return value.detach(), found
