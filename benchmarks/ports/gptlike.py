"""GPT-2 from its formulas: no modules for norms, activation and attention, heads as an axis."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ports.made import written
from ports.weights import Model, State, renamed

# as many heads as channels in a head: swapping the two axes raises no error
SETTINGS = {
    "vocab_size": 512, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 128,
    "initializer_range": 0.12, "attn_implementation": "eager",
}  # fmt: skip
LAYER = "transformer.h.*"
ATTENTION = ("blocks.*", f"{LAYER}.attn")
NORMS = (f"{LAYER}.ln_[12]", "transformer.ln_f")
NAMES = {
    "tokens": "transformer.wte.weight",
    "places": "transformer.wpe.weight",
    "{gain,bias}": "transformer.ln_f.{weight,bias}",
    "blocks.*.{gain,bias}_1": "transformer.h.*.ln_1.{weight,bias}",
    "blocks.*.{gain,bias}_2": "transformer.h.*.ln_2.{weight,bias}",
    "blocks.*.out_bias": "transformer.h.*.attn.c_proj.bias",
    "blocks.*.{up,down}.bias": "transformer.h.*.mlp.{c_fc,c_proj}.bias",
}


def convert(hf: Model) -> State:
    config, state = hf.config, renamed(hf.state_dict(), NAMES)
    heads, width = config.n_head, config.n_embd
    for n, layer in enumerate(hf.transformer.h):
        new, a, m = f"blocks.{n}", layer.attn, layer.mlp
        state[f"{new}.qkv"] = a.c_attn.weight.T.reshape(3, heads, width // heads, width)
        state[f"{new}.qkv_bias"] = a.c_attn.bias.reshape(3, heads, width // heads)
        state[f"{new}.out"] = a.c_proj.weight.T.reshape(width, heads, width // heads)
        state[f"{new}.up.weight"], state[f"{new}.down.weight"] = m.c_fc.weight.T, m.c_proj.weight.T
    return state


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


BUGS = r"""
gelu_square: the activation squares where it should cube
    - 0.044715 * x**3
    + 0.044715 * x**2
    in blocks.* $LAYER.mlp.act
sample_variance: norms divide by the sample's variance (n - 1)
    - variance = (centred * centred).mean(dim=-1, keepdim=True)
    + variance = x.var(dim=-1, keepdim=True)
    in (root) blocks.* $NORMS
softmax_over_queries: softmax divides by sums along the queries
    - exponents / exponents.sum(dim=-1, keepdim=True)
    + exponents / exponents.sum(dim=-2, keepdim=True)
    in $ATTENTION
mask_top_left: the mask of a decode step starts at the top left
    - .tril(diagonal=keys - queries)
    + .tril()
    in $ATTENTION
    also scores = torch.where(
scaled_by_the_width: scores are divided by the root of the model's width
    - math.sqrt(q.shape[-1])
    + math.sqrt(x.shape[-1])
    in $ATTENTION
place_repeated: a decode step takes the place of the token before
    - pasts[0][0].shape[2]
    + pasts[0][0].shape[2] - 1
    in (root) transformer transformer.wpe
    also x = self.tokens[ids] + self.places[
output_bias_forgotten: the output projection adds no bias
    - self.out) + self.out_bias, (k, v)
    + self.out), (k, v)
    in $ATTENTION $LAYER.attn.c_proj
    golden $LAYER.attn.c_proj/Torch.addmm
cache_reversed: new values go in front of the cached ones
    - torch.cat((past[1], v), dim=2)
    + torch.cat((v, past[1]), dim=2)
    in $ATTENTION
heads_for_channels: the fused projection is read with heads and channels swapped
    - "btw,chdw->cbhtd"
    + "btw,cdhw->cbhtd"
    in $ATTENTION
second_norm_shared: the feed-forward part uses the first norm's weight
    - layer_norm(x, self.gain_2,
    + layer_norm(x, self.gain_1,
    in blocks.* $LAYER.ln_2
fused_by_head: the converter reads the fused projection of layer 2 as head by head
    weights each(by_head, "blocks.2.{qkv,qkv_bias}")
    in blocks.2 transformer.h.2.attn.c_attn
output_not_transposed: the converter forgets that a Conv1D is transposed where the matrix is square
    weights each(transposed, "blocks.*.out")
    in blocks.* $LAYER.attn.c_proj
bias_not_loaded: the converter leaves the bias of the first feed-forward matrix at zero
    weights each(torch.zeros_like, "blocks.*.up.bias")
    in blocks.*.up $LAYER.mlp.c_fc
norm_of_the_next_layer: the first norms of layers 1 and 2 are swapped
    weights swap("blocks.1.gain_1", "blocks.2.gain_1")
    in blocks.[12] transformer.h.[12].ln_1
places_shifted: the places begin at the third row
    weights each(lambda places: places.roll(-2, dims=0), "places")
    in (root) transformer.wpe
"""
PORTS = (written(globals(), "gptlike", "GPT", "GPT2LMHeadModel", length=17),)
