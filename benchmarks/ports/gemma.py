"""Gemma 2 as a JAX program: a tensor per kind of weight for all layers, and functions."""

from __future__ import annotations

import torch

from ports.made import SMALL, written
from ports.weights import Model, State, fitting, norms_of

SETTINGS = SMALL | {
    "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 6,
    "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0,
}  # fmt: skip
# the norms before linear layers; the others add to the residual
norms = norms_of(
    "model.layers",
    {
        "input_layernorm": "self_attn.{q,k,v}_proj",
        "pre_feedforward_layernorm": "mlp.{gate,up}_proj",
    },
)
LAYER = "model.layers.*"
ATTENTION = f"{LAYER}.self_attn"
SKIPPED = f"{LAYER}.post_attention_layernorm"


def convert(hf: Model) -> State:
    """Return the weights, those of all layers in one tensor."""
    given = hf.state_dict()

    def stacked(*names: str) -> torch.Tensor:
        """Return [layers, names, ...] without the axis of names if it is one."""
        wholes = [fitting(given, f"{LAYER}.{name}.weight") for name in names]
        kinds = [torch.stack([given[found] for (found,) in whole]) for whole in wholes]
        return torch.stack(kinds, 1) if len(names) > 1 else kinds[0]

    def heads(weight: torch.Tensor, axis: int) -> torch.Tensor:
        return weight.unflatten(axis, (-1, SETTINGS["head_dim"]))

    return {
        "table": given["model.embed_tokens.weight"],
        "final": given["model.norm.weight"],
        "pre_attention": stacked("input_layernorm"),
        "post_attention": stacked("post_attention_layernorm"),
        "pre_mlp": stacked("pre_feedforward_layernorm"),
        "post_mlp": stacked("post_feedforward_layernorm"),
        "q": heads(stacked("self_attn.q_proj"), 1),
        "kv": heads(stacked("self_attn.k_proj", "self_attn.v_proj"), 2),
        "o": heads(stacked("self_attn.o_proj").mT, 1),
        "gating": stacked("mlp.gate_proj", "mlp.up_proj"),
        "linear": stacked("mlp.down_proj").mT,
    }


BUGS = r"""
scale_without_one: norms multiply by the weight, not by one plus the weight
    - (x32 * (1 + scale.to(torch.float32)))
    + (x32 * scale.to(torch.float32))
    in (root) $LAYER.*layernorm model.norm
    golden $LAYER.*layernorm/Tensor.add@forward model.norm/Tensor.add@forward
scores_not_capped: the soft cap of the scores is left out
    - cap(torch.einsum("grtk,gsk->grts", groups, cache[0]), c.attn_logit_softcapping)
    + torch.einsum("grtk,gsk->grts", groups, cache[0])
    in (root) $ATTENTION
    golden $ATTENTION/Tensor.div $ATTENTION/Torch.tanh $ATTENTION/Tensor.mul@eager_attention_forward
logits_not_capped: the soft cap of the logits is left out
    - return cap(x @ self.table.T, c.final_logit_softcapping)
    + return x @ self.table.T
    in (root)
    golden /Tensor.div /Torch.tanh /Tensor.mul
window_one_wider: the sliding window holds one token more
    - distance < c.sliding_window
    + distance <= c.sliding_window
    in (root) model
    also scores.float().masked_fill(
local_and_global_swapped: layers with a sliding window see all, the others a window
    - masks[int(local)]
    + masks[int(not local)]
    in (root) model $LAYER $ATTENTION
    also scores.float().masked_fill(
scaled_by_the_head: queries are scaled by the head's width, not by query_pre_attn_scalar
    - c.query_pre_attn_scalar**-0.5
    + c.head_dim**-0.5
    in (root) $ATTENTION
embedding_not_scaled: embeddings are not multiplied by the root of the width
    - self.table[tokens] * torch.tensor(c.hidden_size**0.5, dtype=self.table.dtype)
    + self.table[tokens]
    in (root) model.embed_tokens
    golden model.embed_tokens/Tensor.mul
activation_on_the_value: the activation is applied to the other half
    - gelu(gate) * value
    + gate * gelu(value)
    in (root) $LAYER.mlp $LAYER.mlp.act_fn
queries_tiled: queries are dealt out to the groups in turns
    - q.unflatten(0, (c.num_key_value_heads, -1))
    + q.unflatten(0, (-1, c.num_key_value_heads)).transpose(0, 1)
    in (root) $ATTENTION
    also scores = cap(torch.einsum("grtk,gsk->grts"
rope_exponent: the frequencies fall half as fast
    - dtype=torch.float32) / half)
    + dtype=torch.float32) / x.shape[-1])
    in (root) model.rotary_emb
norm_skipped: the attention's output is added without its norm
    - x = x + rms(y, self.post_attention[n], eps)
    + x = x + y
    in (root) $LAYER
    golden $SKIPPED $SKIPPED/T*.*
norms_around_the_mlp_swapped: the converter swaps the norms before and after the feed-forward part
    weights swap("pre_mlp", "post_mlp")
    in (root) $LAYER.pre_feedforward_layernorm $LAYER.post_feedforward_layernorm
keys_and_values_swapped: the converter stacks values before keys
    weights each(lambda kv: kv.flip(1), "kv")
    in (root) $ATTENTION.k_proj $ATTENTION.v_proj
output_of_the_layer_before: layer 2 has the output projection of layer 1
    weights each(lambda o: o[[0, 1, 1, 3]], "o")
    in (root) model.layers.2.self_attn.o_proj
"""
PORTS = (written(globals(), "gemma", "Gemma", "Gemma2ForCausalLM", length=18, offset=1.0),)
