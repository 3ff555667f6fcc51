"""Mistakes of one trained model, each in one place.

A bug is put into any right program (`programs.CONTROLS`). One in code is a class that comes before
that of a module, or a function around that of its attention; the line that makes it ends in
``# wrong``. The others are a setting or a weight. ``UNSEEN`` are for scores alone: who changes the
comparison reads neither them nor how single ones go.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ports.entry import Bug as Place
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from real import checkpoint
from real.checkpoint import Model
from real.programs import attention_of

LAYER = "model.layers.{}"
MARK = "# wrong"
Attend = Callable[..., Any]


@dataclass(frozen=True)
class Bug:
    """A mistake. ``plant`` puts it into a model.

    ``modules``: the innermost recorded modules that hold it. ``calls``: the calls inside them that
    take a wrong setting, or that are left out, as paths with operators. ``source``: the code that
    was planted. ``options``: more ones of `ld.dump`, for golden and mine. ``wide``: it is none in a
    model of 16 bits.
    """

    name: str
    what: str
    plant: Callable[[Model], None]
    modules: tuple[str, ...]
    calls: tuple[str, ...] = ()
    source: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    wide: bool = False

    @property
    def file(self) -> str:
        """Return the name of the file that holds the wrong code; "" if there is none."""
        return Path(inspect.getfile(self.source)).name if self.source else ""

    @property
    def place(self) -> Place:
        return Place(self.name, self.what, modules=self.modules, golden=self.calls)

    def lines(self) -> frozenset[int]:
        """Return the numbers of the wrong lines in this file; none if the bug is not in code."""
        if self.source is None:
            return frozenset()
        text, first = inspect.getsourcelines(self.source)
        return frozenset(first + at for at, line in enumerate(text) if line.rstrip().endswith(MARK))


# -- how bugs are planted --------------------------------------------------------------------------


def replaced(name: str, what: str, path: str, code: type, *left_out: str) -> Bug:
    """Return a bug in the code of a module: a class whose methods come before the module's own.

    ``left_out``: golden's calls that it lacks, as paths with operators.
    """

    def plant(model: Model) -> None:
        module = model.get_submodule(path)
        module.__class__ = type(code.__name__, (code, type(module)), {})

    return Bug(name, what, plant, (path,), left_out, source=code)


def taken_by(bug: Bug, *paths: str) -> Bug:
    """Return a bug whose wrong value is what other modules take: to name their input is right."""
    return replace(bug, modules=(*bug.modules, *paths))


def attention(name: str, what: str, layer: int, around: Attend) -> Bug:
    """Return a bug in a layer's function of attention. ``around`` takes the right one first."""
    path = f"{LAYER.format(layer)}.self_attn"

    def plant(model: Model) -> None:
        module = model.get_submodule(path)
        right = ALL_ATTENTION_FUNCTIONS.get_interface(
            module.config._attn_implementation, llama.eager_attention_forward
        )
        ALL_ATTENTION_FUNCTIONS.register(name, partial(around, right))
        attention_of(module, name)

    return Bug(name, what, plant, (path,), source=around)


def weight(
    name: str, what: str, path: str, change: Callable[[torch.Tensor], object], **options: Any
) -> Bug:
    """Return a bug in a module's weight, which ``change`` writes to."""

    def plant(model: Model) -> None:
        module = model.get_submodule(path)
        wrong = module.weight.detach().clone()
        change(wrong)
        module.weight = nn.Parameter(wrong)

    return Bug(name, what, plant, (path,), options=options)


def setting(name: str, what: str, path: str, change: Callable[[Any], object], *calls: str) -> Bug:
    """Return a bug in a module's setting. ``calls``: what takes it, as operators inside."""

    def plant(model: Model) -> None:
        change(model.get_submodule(path))

    return Bug(name, what, plant, (path,), tuple(f"{path}/{call}" for call in calls))


def scaled(of: nn.Module, name: str, factor: float) -> None:
    setattr(of, name, getattr(of, name) * factor)


# -- code ------------------------------------------------------------------------------------------


class SwappedGate:
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # wrong


class GELU:
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))  # wrong


class NoResidual:
    def forward(self, hidden_states, **given):
        states = self.input_layernorm(hidden_states)
        states = hidden_states + self.self_attn(states, **given)[0]
        return self.mlp(self.post_attention_layernorm(states))  # wrong


class Unturned:
    def forward(self, hidden_states, position_embeddings, **given):
        cos, sin = position_embeddings
        if hidden_states.shape[1] == 1:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)  # wrong
        return super().forward(hidden_states, position_embeddings=(cos, sin), **given)


class Restarting:
    def forward(self, input_ids, position_ids=None, **given):
        count = input_ids.shape[1]
        position_ids = torch.arange(count)[None] if count == 1 else position_ids  # wrong
        return super().forward(input_ids, position_ids=position_ids, **given)


class LargerLogits:
    def forward(self, x):
        return super().forward(x) * 1.01  # wrong


def one_position_on(right, module, query, *states, **given):
    half = query.shape[-1] // 2
    angles = checkpoint.trained().model.rotary_emb.inv_freq.repeat(2)
    turned = torch.cat((-query[..., half:], query[..., :half]), -1)
    query = (query * angles.cos() + turned * angles.sin()).to(query.dtype)  # wrong
    return right(module, query, *states, **given)


def one_token_ahead(right, module, query, key, value, attention_mask, **given):
    count, total = query.shape[2], key.shape[2]
    hidden = torch.ones(count, total, dtype=torch.bool).triu(2 + total - count)  # wrong
    mask = torch.zeros(count, total, dtype=query.dtype)
    mask = mask.masked_fill(hidden, torch.finfo(query.dtype).min)
    return right(module, query, key, value, mask[None, None], **given)


def other_head(right, module, query, key, value, *mask, **given):
    heads = torch.tensor([1, 1, 2])
    key, value = key[:, heads], value[:, heads]  # wrong
    return right(module, query, key, value, *mask, **given)


def narrow(right, module, query, key, value, mask, **given):
    wide = query.dtype
    if mask is not None and mask.dtype == wide:
        mask = mask.bfloat16()
    query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()  # wrong
    out, weights = right(module, query, key, value, mask, **given)
    return out.to(wide), weights


# -- the bugs --------------------------------------------------------------------------------------

BUGS = (
    setting(
        "softmax_scale",
        "the scale of the scores is 2 % off",
        "model.layers.15.self_attn",
        partial(scaled, name="scaling", factor=1.02),
        "*.scaled_dot_product_attention",
        "*.matmul",
        "*.einsum",
        "*.mul",
    ),
    setting(
        "norm_eps",
        "the epsilon of a norm is 1e-3",
        "model.layers.5.post_attention_layernorm",
        partial(scaled, name="variance_epsilon", factor=100),
    ),
    setting(
        "rope_theta",
        "the base of the rotary embedding is 10,000",
        "model.rotary_emb",
        lambda module: setattr(module, "inv_freq", module.inv_freq ** (4 / 5)),
    ),
    weight(
        "norm_larger",
        "the weight of a norm is 20 % larger",
        "model.layers.9.input_layernorm",
        lambda weight: weight.mul_(1.2),
    ),
    weight(
        "norm_shifted",
        "0.02 is added to the weight of a norm",
        "model.layers.20.post_attention_layernorm",
        lambda weight: weight.add_(0.02),
    ),
    weight(
        "channel_larger",
        "one channel of a projection is 1.5 times as large, and weights are recorded",
        "model.layers.15.mlp.up_proj",
        lambda weight: weight[100].mul_(1.5),
        weights=True,
    ),
    weight(
        "embedding",
        "one token has the embedding of the next one",
        "model.embed_tokens",
        lambda weight: weight[checkpoint.prompt()[0, -6]].copy_(
            weight[checkpoint.prompt()[0, -6] + 1]
        ),
    ),
    replaced("swapped_gate", "gate and up change places", "model.layers.15.mlp", SwappedGate),
    replaced("gelu", "GELU in place of SiLU", "model.layers.11.mlp", GELU),
    replaced(
        "no_residual",
        "one layer lacks its second residual",
        "model.layers.22",
        NoResidual,
        "model.layers.22/*.add",
    ),
    replaced(
        "unturned", "a layer does not rotate while decoding", "model.layers.15.self_attn", Unturned
    ),
    taken_by(
        replaced("restarting", "positions begin again with each step", "model", Restarting),
        "model.rotary_emb",
    ),
    replaced("larger_logits", "logits are 1 % too large", "lm_head", LargerLogits),
    attention("one_position_on", "queries are rotated one position on", 15, one_position_on),
    attention("one_token_ahead", "the mask shows the next token", 18, one_token_ahead),
    attention("other_head", "a group of queries reads the next group's head", 8, other_head),
    replace(attention("narrow", "one layer's attention is in bfloat16", 15, narrow), wide=True),
)
BY_NAME = {bug.name: bug for bug in BUGS}
