"""GPT-2 from its formulas: no modules for norms, activation and attention, heads as an axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ports.entry import Bug, Model, State
from ports.written import each, swap, written

# as many heads as channels in a head: swapping the two axes raises no error
SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 128,
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}
LAYERS = range(SETTINGS["n_layer"])
ATTENTION = ("blocks.*", "transformer.h.*.attn")
NORMS = ("transformer.h.*.ln_[12]", "transformer.ln_f")


def norms(model: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms before linear layers, with their weights' input channels as last axis."""
    for layer in model.transformer.h:
        yield layer.ln_1, [layer.attn.c_attn.weight.T]
        yield layer.ln_2, [layer.mlp.c_fc.weight.T]


def by_head(weight: torch.Tensor) -> torch.Tensor:
    """Return fused rows read as head by head: queries, keys, values of each."""
    kinds, heads = weight.shape[:2]
    return weight.flatten(0, 1).unflatten(0, (heads, kinds)).transpose(0, 1)


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return the output projection [width, heads, channels] without the transposition."""
    return weight.flatten(1).T.reshape(weight.shape)


def no_bias(state: State) -> None:
    for n in LAYERS:
        state[f"blocks.{n}.up.bias"].zero_()


def next_places(state: State) -> None:
    """Read the places as a file whose first two rows are padding."""
    state["places"] = state["places"].roll(-2, dims=0)


BUGS = (
    Bug(
        "gelu_square",
        "the activation squares where it should cube",
        old="0.044715 * x**3",
        new="0.044715 * x**2",
        modules=("blocks.*", "transformer.h.*.mlp.act"),
    ),
    Bug(
        "sample_variance",
        "norms divide by the sample's variance (n - 1)",
        old="variance = (centred * centred).mean(dim=-1, keepdim=True)",
        new="variance = x.var(dim=-1, keepdim=True)",
        modules=("", "blocks.*", *NORMS),
    ),
    Bug(
        "softmax_over_queries",
        "softmax divides by sums along the queries",
        old="exponents / exponents.sum(dim=-1, keepdim=True)",
        new="exponents / exponents.sum(dim=-2, keepdim=True)",
        modules=ATTENTION,
    ),
    Bug(
        "mask_top_left",
        "the mask of a decode step starts at the top left",
        old=".tril(diagonal=keys - queries)",
        new=".tril()",
        modules=ATTENTION,
        also=("scores = torch.where(",),
    ),
    Bug(
        "scaled_by_the_width",
        "scores are divided by the root of the model's width",
        old="math.sqrt(q.shape[-1])",
        new="math.sqrt(x.shape[-1])",
        modules=ATTENTION,
    ),
    Bug(
        "place_repeated",
        "a decode step takes the place of the token before",
        old="pasts[0][0].shape[2]",
        new="pasts[0][0].shape[2] - 1",
        modules=("", "transformer", "transformer.wpe"),
        also=("x = self.tokens[ids] + self.places[",),
    ),
    Bug(
        "output_bias_forgotten",
        "the output projection adds no bias",
        old="self.out) + self.out_bias, (k, v)",
        new="self.out), (k, v)",
        modules=(*ATTENTION, "transformer.h.*.attn.c_proj"),
        golden=("transformer.h.*.attn.c_proj/Torch.addmm",),
    ),
    Bug(
        "cache_reversed",
        "new values go in front of the cached ones",
        old="torch.cat((past[1], v), dim=2)",
        new="torch.cat((v, past[1]), dim=2)",
        modules=ATTENTION,
    ),
    Bug(
        "heads_for_channels",
        "the fused projection is read with heads and channels swapped",
        old='"btw,chdw->cbhtd"',
        new='"btw,cdhw->cbhtd"',
        modules=ATTENTION,
    ),
    Bug(
        "second_norm_shared",
        "the feed-forward part uses the first norm's weight",
        old="layer_norm(x, self.gain_2,",
        new="layer_norm(x, self.gain_1,",
        modules=("blocks.*", "transformer.h.*.ln_2"),
    ),
    Bug(
        "fused_by_head",
        "the converter reads the fused projection of layer 2 as head by head",
        convert=each(by_head, "blocks.2.qkv", "blocks.2.qkv_bias"),
        modules=("blocks.2", "transformer.h.2.attn.c_attn"),
    ),
    Bug(
        "output_not_transposed",
        "the converter forgets that a Conv1D is transposed where the matrix is square",
        convert=each(transposed, *(f"blocks.{n}.out" for n in LAYERS)),
        modules=("blocks.*", "transformer.h.*.attn.c_proj"),
    ),
    Bug(
        "bias_not_loaded",
        "the converter leaves the bias of the first feed-forward matrix at zero",
        convert=no_bias,
        modules=("blocks.*.up", "transformer.h.*.mlp.c_fc"),
    ),
    Bug(
        "norm_of_the_next_layer",
        "the first norms of layers 1 and 2 are swapped",
        convert=swap("blocks.1.gain_1", "blocks.2.gain_1"),
        modules=("blocks.[12]", "transformer.h.[12].ln_1"),
    ),
    Bug(
        "places_shifted",
        "the places begin at the third row",
        convert=next_places,
        modules=("", "transformer.wpe"),
    ),
)
PORTS = (written("gptlike", "GPT", "GPT2", SETTINGS, BUGS, length=17, norms=norms),)
