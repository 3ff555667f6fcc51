"""More bugs of the trained language model, for scores alone.

Who changes the comparison reads neither these nor how single ones go: they say how it does on what
it has not seen. Only their totals are told.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from real.bugs import attention, replaced, setting, weight


class Weaker:
    def forward(self, x):
        return super().forward(x) * 0.98  # wrong


class Narrow:
    def forward(self, hidden_states):
        return super().forward(hidden_states.bfloat16()).to(hidden_states.dtype)  # wrong


class Centred:
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)  # wrong


def without_the_first(right, module, query, key, value, attention_mask, **given):
    if query.shape[2] == 1:
        attention_mask = torch.zeros(1, 1, 1, key.shape[2], dtype=query.dtype)
        attention_mask[..., 0] = torch.finfo(query.dtype).min  # wrong
    return right(module, query, key, value, attention_mask, **given)


def one_frequency(module):
    module.inv_freq = module.inv_freq.clone()
    module.inv_freq[20] *= 1.1


def exchanged(weight):
    weight[[100, 101]] = weight[[101, 100]]


def in_eight_bits(weight):
    step = weight.abs().max() / 127
    weight.copy_((weight / step).round() * step)


UNSEEN = (
    setting("one_frequency", "one frequency is 10 % off", "model.rotary_emb", one_frequency),
    replaced("weaker", "an output is 2 % too small", "model.layers.19.self_attn.o_proj", Weaker),
    replace(
        replaced("narrow_norm", "a norm in bfloat16", "model.layers.7.input_layernorm", Narrow),
        wide=True,
    ),
    replaced(
        "centred", "a norm takes the mean away", "model.layers.13.post_attention_layernorm", Centred
    ),
    attention("without_the_first", "decoding hides the first token", 21, without_the_first),
    weight("exchanged", "two channels change places", "model.layers.17.mlp.down_proj", exchanged),
    weight(
        "in_eight_bits", "keys in eight bits", "model.layers.12.self_attn.k_proj", in_eight_bits
    ),
)
