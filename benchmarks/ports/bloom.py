"""BLOOM as functions over a dictionary of weights, against Hugging Face's."""

from __future__ import annotations

from ports.bugs import bugs
from ports.weights import State, hugging_face, norms
from ports.written import written

SETTINGS = {
    "vocab_size": 512,
    "hidden_size": 48,
    "n_layer": 3,
    "n_head": 6,  # not a power of two
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
# the head is the embedding too
BEFORE = {
    "input_layernorm": "self_attention.query_key_value",
    "post_attention_layernorm": "mlp.dense_h_to_4h",
}


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
        "bloom-functions",
        "Bloom",
        hugging_face("BloomForCausalLM", SETTINGS),
        bugs(BUGS, globals()),
        file="bloom_functions",
        norms=norms("transformer.h", BEFORE),
        length=17,
    ),
)
