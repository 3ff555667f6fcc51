"""MPT for a server with flat tokens and pages of keys and values, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ports.entry import Bug, Model, State
from ports.written import written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 6,  # not a power of two
    "max_seq_len": 64,
    "attn_config": {"clip_qkv": 1.5},
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms of the blocks; the head is the embedding too."""
    for block in hf.transformer.blocks:
        yield block.norm_1, [block.attn.Wqkv]
        yield block.norm_2, [block.ffn.up_proj]


def kinds_first(state: State) -> None:
    """Leave the fused rows as all queries, all keys, all values."""
    for n in range(SETTINGS["n_layers"]):
        rows = state[f"blocks.{n}.attn.qkv.weight"].unflatten(0, (SETTINGS["n_heads"], 3, -1))
        state[f"blocks.{n}.attn.qkv.weight"] = rows.transpose(0, 1).flatten(0, 2)


BLOCK = "transformer.blocks.*"
ATTENTION = ("blocks.*.attn", f"{BLOCK}.attn")
BUGS = (
    Bug(
        "slopes_in_order",
        "the slopes of ALiBi are the steepest ones in order",
        old="    if power != heads:\n        ladder = torch.cat((ladder[1::2], ladder[0::2]))\n",
        new="",
        modules=("transformer", *ATTENTION),
        also=("return ladder[:heads]",),
        early=True,
    ),
    Bug(
        "no_bias_in_decoding",
        "while decoding, the scores get no bias",
        old="            scores = scores - self.slopes * torch.arange(length - 1, -1, -1)\n",
        new="",
        modules=ATTENTION,
        golden=(f"{BLOCK}.attn/Tensor.add",),
        also=("parts.append(scores.softmax",),
    ),
    Bug(
        "not_clipped",
        "queries, keys and values are not clipped",
        old="        fused = fused.clamp(-self.clip, self.clip)\n",
        new="",
        modules=ATTENTION,
        golden=(f"{BLOCK}.attn/Tensor.clamp",),
        also=("pages.write(k, v", "q = q * self.dim**-0.5"),
    ),
    Bug(
        "page_turned_early",
        "the last token of a page is written to the next page",
        old="self.tables[n, at // PAGE]",
        new="self.tables[n, (at + 1) // PAGE]",
        modules=("", *ATTENTION),
        also=(
            "self.keys[page, :, :, place] = k",
            "self.values[page, place] = v",
            "k = self.keys[some]",
            "v = self.values[some]",
            "scores = (q[n, :, None] @ k)",
        ),
    ),
    Bug(
        "residual_after_norm",
        "the residual of the MLP is taken after the norm",
        old="return x + self.mlp(h)",
        new="return h + self.mlp(h)",
        modules=("blocks.*", f"{BLOCK}.ffn", BLOCK),
    ),
    Bug(
        "kinds_first",
        "the converter leaves the fused rows as all queries, all keys, all values",
        convert=kinds_first,
        modules=("blocks.*.attn.qkv", f"{BLOCK}.attn.Wqkv"),
    ),
)
PORTS = (written("alibi", "Server", "Mpt", SETTINGS, BUGS, norms=norms, length=19),)
