"""GPT-2 as a file to learn from, which computes the whole text at each step, against HF's."""

from __future__ import annotations

import torch

from ports import gptlike
from ports.entry import Logits
from ports.made import written
from ports.steps import spans
from ports.weights import Model, State, renamed, transpose

WIDTH = 64
SETTINGS = {
    "vocab_size": 512, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 48,
    "initializer_range": 0.15, "attn_implementation": "sdpa",
}  # fmt: skip
LAYER = "transformer.h.*"
ATTENTION = ("h.*.attn", f"{LAYER}.attn")
NAMES = {"{wte,wpe,h,ln_f}": "transformer.{wte,wpe,h,ln_f}", "lm_head": "lm_head"}


def convert(hf: Model) -> State:
    """Return the weights: those of Conv1D are transposed."""
    state = renamed(hf.state_dict(), NAMES)
    transpose("h.*.attn.{c_attn,c_proj}.weight", "h.*.mlp.{c_fc,c_proj}.weight")(state)
    return state


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    texts = (ids[:, :end] for _, end in spans(ids))
    return [model(text, use_cache=False, logits_to_keep=1).logits for text in texts]


BUGS = r"""
squares_left: the square matrices of Conv1D are not transposed
    weights transpose("h.*.attn.c_proj.weight")  # no shape complains
    in h.*.attn.c_proj $LAYER.attn.c_proj
query_bias_alone: the biases of keys and values stay zero
    weights each(lambda b: zeroed(b, WIDTH), "h.*.attn.c_attn.bias")
    in h.*.attn.c_attn $LAYER.attn.c_attn
layers_swapped: layers 1 and 2 have each other's feed-forward weights
    weights swap("h.1.mlp", "h.2.mlp")
    in h.[12].mlp.c_fc h.[12].mlp.c_proj transformer.h.[12].mlp.c_fc transformer.h.[12].mlp.c_proj
keys_first: the fused projection is split as keys, queries, values
    - q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
    + k, q, v = self.c_attn(x).split(self.n_embd, dim=2)
    in $ATTENTION
    also att = (q @ k.transpose(-2, -1))
    also k = k.view(
    also q = q.view(
values_not_by_head: the values are laid out with places and heads mixed up
    - v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
    + v = v.reshape(B, self.n_head, T, C // self.n_head)
    in $ATTENTION
    also y = att @ v
heads_not_joined: the heads are joined without the transposition
    - y = y.transpose(1, 2).contiguous().view(B, T, C)
    + y = y.contiguous().view(B, T, C)
    in $ATTENTION
    also self.resid_dropout(self.c_proj(y))
masked_with_zero: masked scores are zero
    - float("-inf")
    + 0.0
    in $ATTENTION
scaled_by_width: scores are scaled with the model's width
    - (1.0 / math.sqrt(k.size(-1)))
    + (1.0 / math.sqrt(C))
    in $ATTENTION
softmax_over_heads: softmax goes over the queries
    - att = F.softmax(att, dim=-1)
    + att = F.softmax(att, dim=-2)
    in $ATTENTION
gelu_factor: the activation has a digit too few
    - 0.044715
    + 0.44715
    in h.*.mlp.gelu $LAYER.mlp.act
post_norm: the feed-forward part is normalised behind it
    - return x + self.mlp(self.ln_2(x))
    + return x + self.ln_2(self.mlp(x))
    in h.* h.*.ln_2 $LAYER $LAYER.ln_2
not_summed: attention's output replaces its input
    - x = x + self.attn(self.ln_1(x))
    + x = self.attn(self.ln_1(x))
    in h.* $LAYER
places_from_one: places are counted from one
    - torch.arange(0, idx.size(1))
    + torch.arange(1, idx.size(1) + 1)
    in (root) wpe transformer.wpe
    also self.wpe(pos)
no_last_norm: the last norm is left out
    -         x = self.ln_f(x)
    in (root) ln_f transformer.ln_f
    golden transformer.ln_f*
    also return self.lm_head(
"""
norms = gptlike.norms
PORTS = (written(globals(), "small-gpt", "SmallGPT", "GPT2LMHeadModel", file="small_gpt"),)
