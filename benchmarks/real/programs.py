"""Right programs of one trained model: other attention, code written anew, caches, a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ports.entry import scratch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import StaticCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from real import checkpoint
from real.checkpoint import Model

STEPS = 3  # recorded ones: the prompt and two tokens
Change = Callable[[Model], None]
Work = Callable[[Model], object]
WRITTEN_ANEW = "written_anew"  # attention, as Transformers knows it
ONE = 15  # the layer that is rewritten alone


# -- code written anew -----------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of groups of heads, without a repeated key or value."""
    query = (query * scaling).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bgntd,bgsd->bgnts", query, key).float()
    least = torch.finfo(scores.dtype).min
    if attention_mask is None:
        count, total = scores.shape[-2:]
        seen = torch.arange(total) <= torch.arange(total - count, total)[:, None]
        scores = scores.masked_fill(~seen, least)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask[:, :, None], least)
    else:
        scores = scores + attention_mask[:, :, None]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = (weights / weights.sum(-1, keepdim=True)).to(value.dtype)
    return torch.einsum("bgnts,bgsd->btgnd", weights, value).flatten(2, 3), None


ALL_ATTENTION_FUNCTIONS.register(WRITTEN_ANEW, attend)


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return vectors whose halves are the parts of complex numbers, multiplied."""
    parts = torch.complex(*x.float().chunk(2, -1)) * turn
    return torch.cat((parts.real, parts.imag), -1).to(x.dtype)


class Attention(llama.LlamaAttention):
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (each[:, None, :, : self.head_dim // 2] for each in position_embeddings)
        turn = torch.complex(cos.float(), sin.float())
        query, key = turned(query, turn), turned(key, turn)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attention(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0
        )
        return self.o_proj(out.flatten(2)), None


class MLP(llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.up_proj(x) * gate * torch.sigmoid(gate))


class Norm(llama.LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        size = (wide.square().sum(-1, keepdim=True) / wide.shape[-1] + self.variance_epsilon).sqrt()
        return (wide / size * self.weight.float()).to(x.dtype)


def attention_of(module: nn.Module, name: str) -> None:
    """Give one layer another function of attention than its model has."""
    module.config = type(module.config).from_dict(module.config.to_dict())
    module.config._attn_implementation = name


def anew(*parts: str, layers: range | None = None) -> Change:
    """Return what rewrites parts of a model: attention, mlp, norm. ``layers``: all by default."""

    def change(model: Model) -> None:
        for number in layers or range(len(model.model.layers)):
            layer = model.model.layers[number]
            if "attention" in parts:
                layer.self_attn.__class__ = Attention
                attention_of(layer.self_attn, WRITTEN_ANEW)
            if "mlp" in parts:
                layer.mlp.__class__ = MLP
            if "norm" in parts:
                layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = Norm
        if "norm" in parts and layers is None:
            model.model.norm.__class__ = Norm

    return change


def implementation(name: str) -> Change:
    return lambda model: model.set_attn_implementation(name)


# -- what is done with a model ---------------------------------------------------------------------


def generate(model: Model, **given: Any) -> object:
    """Answer the question: the prompt and more steps than are recorded."""
    given = {"input_ids": checkpoint.prompt(), **given}
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    return model.generate(**given, max_new_tokens=STEPS + 1, do_sample=False)


def padded(model: Model) -> object:
    """Answer two questions at once. The first one is longer, so that the other is padded."""
    ids = checkpoint.prompt()
    more = checkpoint.prompt("Tell me in a few words: which city is the capital of Italy?")
    gap = more.shape[1] - ids.shape[1]
    pad = ids.new_full((1, gap), model.config.pad_token_id)
    mask = torch.ones(2, more.shape[1], dtype=torch.long)
    mask[0, :gap] = 0
    both = torch.cat((torch.cat((pad, ids), 1), more))
    return generate(model, input_ids=both, attention_mask=mask)


def with_static_cache(model: Model) -> object:
    cache = StaticCache(config=model.config, max_cache_len=64)
    return generate(model, past_key_values=cache)


def with_sliding_cache(model: Model) -> object:
    """Generate with a window that is longer than the text."""
    layers = [DynamicSlidingWindowLayer(sliding_window=64) for _ in model.model.layers]
    return generate(model, past_key_values=Cache(layers=layers))


def without_cache(model: Model) -> object:
    return generate(model, use_cache=False)


def once(model: Model) -> object:
    """Run the prompt alone."""
    return model(input_ids=checkpoint.prompt(), use_cache=False)


def exported(model: Model) -> Any:
    """Return a session of ONNX Runtime on the model's export, for the prompt alone."""
    import onnxruntime as ort

    given = {"input_ids": checkpoint.prompt(), "use_cache": False}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    path = scratch() / "model.onnx"  # stays: recording reads it again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        program = torch.onnx.export(model, (), kwargs=given, dynamo=True, verbose=False)
    program.save(path, external_data=True)
    return ort.InferenceSession(path, options)


def fed(session: Any) -> object:
    return session.run(None, {"input_ids": checkpoint.prompt().numpy()})


def with_math(model: Model) -> object:
    with sdpa_kernel(SDPBackend.MATH):
        return generate(model)


# -- right programs --------------------------------------------------------------------------------


def as_it_is(model: Model) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Control:
    """A right program. ``change``: of the model. ``work``: what is done with it.

    ``golden``: what golden does. ``compiled``: by `torch.compile`. ``session``: what makes a
    session of ONNX Runtime of the model. The last two exist in float32 alone, and take minutes.
    """

    name: str
    change: Change = as_it_is
    work: Work = generate
    golden: Work = generate
    compiled: bool = False
    session: Callable[[Model], Any] | None = None

    @property
    def slow(self) -> bool:
        return self.compiled or self.session is not None

    def made(self, model: Model) -> Any:
        """Return what is recorded: a model, changed, or a session."""
        self.change(model)
        return self.session(model) if self.session else model


LONE = range(ONE, ONE + 1)
REWRITES = (
    Control("sdpa"),
    Control("eager", implementation("eager")),
    Control("attention_one", anew("attention", layers=LONE)),
    Control("attention_all", anew("attention")),
    Control("mlp_one", anew("mlp", layers=LONE)),
    Control("mlp_all", anew("mlp")),
    Control("norm_one", anew("norm", layers=LONE)),
    Control("norm_all", anew("norm")),
    Control("all_anew", anew("attention", "mlp", "norm")),
)
CONTROLS = (
    *REWRITES,
    Control("math", work=with_math),
    Control("padded", work=padded),
    Control("static_cache", work=with_static_cache),
    Control("sliding_cache", work=with_sliding_cache),
    Control("no_cache", work=without_cache),
    Control("compiled", work=once, golden=once, compiled=True),
    Control("onnx", work=fed, golden=once, session=exported),
)


@torch.no_grad()
def run(control: Control, model: Model) -> object:
    return control.work(model)
