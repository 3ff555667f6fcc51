"""BLOOM as functions over a dictionary of weights, against Hugging Face's."""

from __future__ import annotations

from ports.made import written
from ports.weights import Model, State, each, norms_of, renamed

HEADS = 6  # not a power of two
SETTINGS = {
    "vocab_size": 512, "hidden_size": 48, "n_layer": 3, "n_head": HEADS, "initializer_range": 0.15,
    "attn_implementation": "eager",
}  # fmt: skip
NAMES = {"w.emb": "transformer.word_embeddings.weight"}
for end, kind in (("g", "weight"), ("b", "bias")):
    NAMES |= {
        f"w.{{emb_ln,ln_f}}_{end}": f"transformer.{{word_embeddings_layernorm,ln_f}}.{kind}",
        f"w.h*_ln{{1,2}}_{end}": f"transformer.h.*.{{input,post_attention}}_layernorm.{kind}",
    }
for end, kind in (("w", "weight"), ("b", "bias")):
    NAMES |= {
        f"w.h*_qkv_{end}": f"transformer.h.*.self_attention.query_key_value.{kind}",
        f"w.h*_out_{end}": f"transformer.h.*.self_attention.dense.{kind}",
        f"w.h*_up_{end}": f"transformer.h.*.mlp.dense_h_to_4h.{kind}",
        f"w.h*_down_{end}": f"transformer.h.*.mlp.dense_4h_to_h.{kind}",
    }
# the head is the embedding too
norms = norms_of(
    "transformer.h",
    {
        "input_layernorm": "self_attention.query_key_value",
        "post_attention_layernorm": "mlp.dense_h_to_4h",
    },
)


def convert(hf: Model) -> State:
    state = renamed(hf.state_dict(), NAMES)
    each(lambda w: w.T, "w.h*_{out,up,down}_w")(state)
    # the rows are ordered by head, then query, key and value, then channel
    each(lambda w: w.unflatten(0, (HEADS, 3, -1)).permute(1, 3, 0, 2), "w.h*_qkv_w")(state)
    each(lambda b: b.unflatten(0, (HEADS, 3, -1)).transpose(0, 1), "w.h*_qkv_b")(state)
    return {name: value.contiguous() for name, value in state.items()}


def kinds_before_heads(state: State) -> None:
    """Read the fused rows of layer 1 as [3, heads, channels]; they are [heads, 3, channels]."""
    w, b = state["w.h1_qkv_w"], state["w.h1_qkv_b"]
    rows = w.permute(2, 0, 3, 1)  # [heads, 3, channels, width]
    kinds, width, heads, dim = w.shape
    wrong = rows.reshape(kinds, heads, dim, width)
    state["w.h1_qkv_w"] = wrong.permute(0, 3, 1, 2).contiguous()
    state["w.h1_qkv_b"] = b.transpose(0, 1).reshape(b.shape).contiguous()


LAYER = "transformer.h.*"  # the port is one module, so that the modules are golden's
BIAS = ("transformer", f"{LAYER}.self_attention")
BUGS = r"""
slopes_not_skipped: heads beyond the power of two take neighbouring slopes, not every other one
    - more = power_of_two(2 * m)[0::2]
    + more = power_of_two(2 * m)
    in $BIAS
    also return power_of_two(m) + more
    also slopes = torch.tensor(slopes_of
    also bias = -slopes[:, None, None]
    also score = q[i] @ k[i].T
gelu_exact: GELU is the exact one
    - return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))
    + return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    in $LAYER.mlp.gelu_impl $LAYER.mlp
    least 0.0001
residual_after_norm: the residual of attention is taken after the norm
    - x = x + attention(w, n, h, bias, past)
    + x = h + attention(w, n, h, bias, past)
    in $LAYER.self_attention $LAYER
embedding_not_normed: the norm of the embeddings is left out
    -     x = ln(w, "emb_ln", x, eps)
    in transformer.word_embeddings_layernorm
    golden transformer.word_embeddings_layernorm transformer.word_embeddings_layernorm/*.*
    also h = ln(w, f"h{n}_ln1"
newest_masked: while decoding, the query's place is one too low, so that its own key is masked
    - query = torch.arange(start, start + new)
    + query = torch.arange(new) + max(start - 1, 0)
    in $BIAS
    also back = query[:, None]
    also return bias.masked_fill(
    also score = q[i] @ k[i].T
kinds_before_heads: the converter reads layer 1's fused rows as all queries, all keys, all values
    weights kinds_before_heads
    in transformer.h.1.self_attention.query_key_value
"""
PORTS = (
    written(
        globals(),
        "bloom-functions",
        "Bloom",
        "BloomForCausalLM",
        file="bloom_functions",
        length=17,
    ),
)
