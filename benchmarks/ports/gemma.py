"""Gemma 2 as a JAX program: a tensor per kind of weight for all layers, and functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ports.entry import Bug, Model, State
from ports.written import SMALL, each, swap, written

SETTINGS: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
}
ATTENTION = "model.layers.*.self_attn"
SKIPPED = "model.layers.*.post_attention_layernorm"


def norms(model: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms before linear layers; the others add to the residual."""
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        yield layer.pre_feedforward_layernorm, [m.gate_proj, m.up_proj]


def output_of_the_layer_before(state: State) -> None:
    state["o"][2] = state["o"][1].clone()


BUGS = (
    Bug(
        "scale_without_one",
        "norms multiply by the weight, not by one plus the weight",
        old="(x32 * (1 + scale.to(torch.float32)))",
        new="(x32 * scale.to(torch.float32))",
        modules=("", "model.layers.*.*layernorm", "model.norm"),
        golden=("model.layers.*.*layernorm/Tensor.add@forward", "model.norm/Tensor.add@forward"),
    ),
    Bug(
        "scores_not_capped",
        "the soft cap of the scores is left out",
        old='cap(torch.einsum("grtk,gsk->grts", groups, cache[0]), c.attn_logit_softcapping)',
        new='torch.einsum("grtk,gsk->grts", groups, cache[0])',
        modules=("", ATTENTION),
        golden=(
            f"{ATTENTION}/Tensor.div",
            f"{ATTENTION}/Torch.tanh",
            f"{ATTENTION}/Tensor.mul@eager_attention_forward",
        ),
    ),
    Bug(
        "logits_not_capped",
        "the soft cap of the logits is left out",
        old="return cap(x @ self.table.T, c.final_logit_softcapping)",
        new="return x @ self.table.T",
        modules=("",),
        golden=("/Tensor.div", "/Torch.tanh", "/Tensor.mul"),
    ),
    Bug(
        "window_one_wider",
        "the sliding window holds one token more",
        old="distance < c.sliding_window",
        new="distance <= c.sliding_window",
        modules=("", "model"),
        also=("scores.float().masked_fill(",),
    ),
    Bug(
        "local_and_global_swapped",
        "layers with a sliding window see all, the others a window",
        old="masks[int(local)]",
        new="masks[int(not local)]",
        modules=("", "model", "model.layers.*", ATTENTION),
        also=("scores.float().masked_fill(",),
    ),
    Bug(
        "scaled_by_the_head",
        "queries are scaled by the head's width, not by query_pre_attn_scalar",
        old="c.query_pre_attn_scalar**-0.5",
        new="c.head_dim**-0.5",
        modules=("", ATTENTION),
    ),
    Bug(
        "embedding_not_scaled",
        "embeddings are not multiplied by the root of the width",
        old="self.table[tokens] * torch.tensor(c.hidden_size**0.5, dtype=self.table.dtype)",
        new="self.table[tokens]",
        modules=("", "model.embed_tokens"),
        golden=("model.embed_tokens/Tensor.mul",),
    ),
    Bug(
        "activation_on_the_value",
        "the activation is applied to the other half",
        old="gelu(gate) * value",
        new="gate * gelu(value)",
        modules=("", "model.layers.*.mlp", "model.layers.*.mlp.act_fn"),
    ),
    Bug(
        "queries_tiled",
        "queries are dealt out to the groups in turns",
        old="q.unflatten(0, (c.num_key_value_heads, -1))",
        new="q.unflatten(0, (-1, c.num_key_value_heads)).transpose(0, 1)",
        modules=("", ATTENTION),
        also=('scores = cap(torch.einsum("grtk,gsk->grts"',),
    ),
    Bug(
        "rope_exponent",
        "the frequencies fall half as fast",
        old="dtype=torch.float32) / half)",
        new="dtype=torch.float32) / x.shape[-1])",
        modules=("", "model.rotary_emb"),
    ),
    Bug(
        "norm_skipped",
        "the attention's output is added without its norm",
        old="x = x + rms(y, self.post_attention[n], eps)",
        new="x = x + y",
        modules=("", "model.layers.*"),
        golden=(SKIPPED, f"{SKIPPED}/T*.*"),
    ),
    Bug(
        "norms_around_the_mlp_swapped",
        "the converter swaps the norms before and after the feed-forward part",
        convert=swap("pre_mlp", "post_mlp"),
        modules=(
            "",
            "model.layers.*.pre_feedforward_layernorm",
            "model.layers.*.post_feedforward_layernorm",
        ),
    ),
    Bug(
        "keys_and_values_swapped",
        "the converter stacks values before keys",
        convert=each(lambda kv: kv.flip(1), "kv"),
        modules=("", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
    ),
    Bug(
        "output_of_the_layer_before",
        "layer 2 has the output projection of layer 1",
        convert=output_of_the_layer_before,
        modules=("", "model.layers.2.self_attn.o_proj"),
    ),
)
PORTS = (written("gemma", "Gemma", "Gemma2", SETTINGS, BUGS, length=18, norms=norms, offset=1.0),)
