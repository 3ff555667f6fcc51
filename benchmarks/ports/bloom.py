"""BLOOM as functions over a dictionary of weights, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ports.entry import Bug, Logits, Model, State
from ports.written import written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "n_layer": 3,
    "n_head": 6,  # not a power of two
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms of the layers; the head is the embedding too."""
    for layer in hf.transformer.h:
        yield layer.input_layernorm, [layer.self_attention.query_key_value]
        yield layer.post_attention_layernorm, [layer.mlp.dense_h_to_4h]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    logits, cache, prompt = [], None, ids.shape[1] - 3
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return logits


def kinds_before_heads(state: State) -> None:
    """Read the fused rows of layer 1 as [3, heads, channels]; they are [heads, 3, channels]."""
    w, b = state["w.h1_qkv_w"], state["w.h1_qkv_b"]
    rows = w.permute(2, 0, 3, 1)  # [heads, 3, channels, width]
    kinds, width, heads, dim = w.shape
    wrong = rows.reshape(kinds, heads, dim, width)
    state["w.h1_qkv_w"] = wrong.permute(0, 3, 1, 2).contiguous()
    state["w.h1_qkv_b"] = b.transpose(0, 1).reshape(b.shape).contiguous()


# the port is one module, so that the modules are golden's
BIAS = ("transformer", "transformer.h.*.self_attention")
BUGS = (
    Bug(
        "slopes_not_skipped",
        "heads beyond the power of two take neighbouring slopes, not every other one",
        old="more = power_of_two(2 * m)[0::2]",
        new="more = power_of_two(2 * m)",
        modules=BIAS,
        also=(
            "return power_of_two(m) + more",
            "slopes = torch.tensor(slopes_of",
            "bias = -slopes[:, None, None]",
            "score = q[i] @ k[i].T",
        ),
    ),
    Bug(
        "gelu_exact",
        "GELU is the exact one",
        old="return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))",
        new="return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))",
        modules=("transformer.h.*.mlp.gelu_impl", "transformer.h.*.mlp"),
        least=1e-4,  # the two forms are that close
    ),
    Bug(
        "residual_after_norm",
        "the residual of attention is taken after the norm",
        old="x = x + attention(w, n, h, bias, past)",
        new="x = h + attention(w, n, h, bias, past)",
        modules=("transformer.h.*.self_attention", "transformer.h.*"),
    ),
    Bug(
        "embedding_not_normed",
        "the norm of the embeddings is left out",
        old='    x = ln(w, "emb_ln", x, eps)\n',
        new="",
        modules=("transformer.word_embeddings_layernorm",),
        golden=(
            "transformer.word_embeddings_layernorm",
            "transformer.word_embeddings_layernorm/*.*",
        ),
        also=('h = ln(w, f"h{n}_ln1"',),
    ),
    Bug(
        "newest_masked",
        "while decoding, the query's place is one too low, so that its own key is masked",
        old="query = torch.arange(start, start + new)",
        new="query = torch.arange(new) + max(start - 1, 0)",
        modules=BIAS,
        also=(
            "back = query[:, None]",
            "return bias.masked_fill(",
            "score = q[i] @ k[i].T",
        ),
    ),
    Bug(
        "kinds_before_heads",
        "the converter reads the fused rows of layer 1 as all queries, all keys, all values",
        convert=kinds_before_heads,
        modules=("transformer.h.1.self_attention.query_key_value",),
    ),
)
PORTS = (
    replace(
        written(
            "bloom-functions",
            "Bloom",
            "Bloom",
            SETTINGS,
            BUGS,
            file="bloom_functions",
            norms=norms,
            length=17,
        ),
        golden_work=golden_work,
    ),
)
