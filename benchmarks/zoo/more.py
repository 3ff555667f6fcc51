"""A second set of bugs and benign changes, on other architectures, against overfitting."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo import models
from zoo.bugs import ATTEND
from zoo.entry import BOTH, Answer, Case, Zoo
from zoo.models import Model, attend, attention_function, with_globals

MORE = Zoo()
DECODERS = "gpt_neox olmo2 qwen3 mistral qwen2_moe starcoder2"


@MORE.add("M1", "key and value heads repeated in the wrong order", on="qwen3 mistral starcoder2")
def wrong_repeat(model: Model, case: Case) -> Answer:
    def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat(1, times, 1, 1)

    attn = case.part(model, "attn")
    attend(
        attn,
        with_globals(
            attention_function(attn), repeat_kv=repeat_kv, use_gqa_in_sdpa=lambda *_: False
        ),
    )
    return Answer.at(
        f"{case.path('attn')}/*@repeat_kv",
        f"{case.path('attn')}/Functional.scaled_dot_product_attention",
    )


@MORE.add("M2", "sliding window off by one", on="mistral")
def wider_window(model: Model, case: Case) -> Answer:
    model.config.sliding_window += 1
    body = case.path("body")
    window = (
        f"{body}/Torch.tensor@__init__",
        f"{body}/*@inner_mask",
    )  # in the cache, and in the mask
    return Answer.at(*window, f"{body}/Tensor.sub", f"{body}/Tensor.gt")


@MORE.add("M3", "weights of the chosen experts not normalised", on="qwen2_moe")
def not_normalised(model: Model, case: Case) -> Answer:
    case.part(model, "mlp").gate.norm_topk_prob = False
    gate = f"{case.path('mlp')}.gate"
    return Answer.at(f"{gate}/Tensor.sum", f"{gate}/Tensor.*div*", f"{gate}/Tensor.to")


@MORE.add("M4", "residual connection missing", on="olmo2")
def no_residual(model: Model, case: Case) -> Answer:
    layer = case.part(model)

    def forward(hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        attended = layer.post_attention_layernorm(
            layer.self_attn(hidden_states=hidden_states, **given)[0]
        )
        return layer.post_feedforward_layernorm(layer.mlp(hidden_states + attended))

    layer.forward = forward
    return Answer.at(f"{case.path()}/Tensor.add")


@MORE.add("M5", "norm after attention instead of before", on="qwen3 mistral")
def norm_after(model: Model, case: Case) -> Answer:
    layer = case.part(model)

    def forward(hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        hidden_states = hidden_states + layer.input_layernorm(
            layer.self_attn(hidden_states=hidden_states, **given)[0]
        )
        return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

    layer.forward = forward
    return Answer.at(
        case.path(),
        case.path("attn"),
        case.path("norm"),
        f"{case.path('norm')}/Tensor.pow",
        modules=(f"{case.path('attn')}.?_proj",),
    )


@MORE.add("M6", "tanh for exact GELU, or the other way round", on="gpt_neox starcoder2")
def other_gelu(model: Model, case: Case) -> Answer:
    mlp = case.part(model, "mlp")
    mlp.act = nn.GELU(approximate="tanh" if case.architecture == "gpt_neox" else "none")
    return Answer.at(f"{case.path('mlp')}.act", f"{case.path('mlp')}.act/*")


@MORE.add("M7", "scale of the whole width in one layer's attention", on="gpt_neox qwen3 olmo2")
def width_scale(model: Model, case: Case) -> Answer:
    case.part(model, "attn").scaling = model.config.hidden_size**-0.5
    return Answer.at(
        f"{case.path('attn')}/Tensor.mul@{ATTEND}",
        f"{case.path('attn')}/Functional.scaled_dot_product_attention",
    )


@MORE.add("M8", "position one too small once the cache is filled", on="gpt_neox olmo2")
def one_behind(model: Model, case: Case) -> Answer:
    rotary = case.part(model, "body").rotary_emb
    right = rotary.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return right(x, position_ids - 1 if position_ids.shape[-1] == 1 else position_ids)

    rotary.forward = forward
    path = f"{case.path('body')}.rotary_emb"
    return Answer.at(f"{path}/Tensor.sub", f"{path}/Tensor.float", step=1)


@MORE.add("M9", "one projection's weight transposed", on="olmo2 mistral t5")
def transposed(model: Model, case: Case) -> Answer:
    name = "o" if case.architecture == "t5" else "o_proj"
    weight = getattr(case.part(model, "attn"), name).weight
    weight.data = weight.data.T.contiguous()
    return Answer.at(f"{case.path('attn')}.{name}", f"{case.path('attn')}.{name}/*")


@MORE.add("M10", "embedding scale missing", on="gemma3")
def no_scale(model: Model, case: Case) -> Answer:
    case.part(model, "embed").embed_scale.fill_(1.0)
    return Answer.at(case.path("embed"), f"{case.path('embed')}/Tensor.mul")


@MORE.add("M11", "relative positions of a decoder bucketed as an encoder's", on="t5")
def wrong_buckets(model: Model, case: Case) -> Answer:
    attn = case.part(model, "attn", 0)
    right = attn._relative_position_bucket
    attn._relative_position_bucket = lambda relative, bidirectional, **given: right(
        relative, bidirectional=True, **given
    )
    path = case.path("attn", 0)
    return Answer.at(
        f"{path}/*@_relative_position_bucket", f"{path}/Tensor.to@_relative_position_bucket"
    )


@MORE.add("M12", "bias of the last norm not loaded", on="gpt_neox starcoder2")
def no_bias(model: Model, case: Case) -> Answer:
    case.part(model, "final").bias.data.zero_()
    return Answer.at(case.path("final"), f"{case.path('final')}/*")


# a thousandth is less than bf16 can tell
@MORE.add("M13", "activation off by a thousandth", on="mistral qwen2_moe", precisions=("fp32",))
def weak_activation(model: Model, case: Case) -> Answer:
    mlp, path = case.part(model, "mlp"), case.path("mlp")
    if case.architecture == "qwen2_moe":
        mlp, path = mlp.shared_expert, f"{path}.shared_expert"

    class Weak(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(x) * 1.001

    mlp.act_fn = Weak()
    return Answer.at(f"{path}.act_fn", f"{path}.act_fn/*")


class Rolled:
    """A cache whose values come back one place further on than they were put, once it is filled."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, key: torch.Tensor, value: torch.Tensor, *given: Any) -> Any:
        keys, values = self._cache.update(key, value, *given)
        return keys, values.roll(1, dims=2) if key.shape[2] == 1 else values


@MORE.add("M14", "cached values read one place off", on="qwen3 olmo2")
def rolled(model: Model, case: Case) -> Answer:
    attn = case.part(model, "attn")
    right = attn.forward

    def forward(*args: Any, past_key_values: Any = None, **given: Any) -> Any:
        return right(
            *args,
            past_key_values=None if past_key_values is None else Rolled(past_key_values),
            **given,
        )

    attn.forward = forward
    return Answer.at(
        f"{case.path('attn')}/Tensor.roll", f"{case.path('attn')}/Torch.cat@update", step=1
    )


@MORE.add("M15", "base of RoPE 500,000 instead of 10,000", on="qwen3 starcoder2")
def wrong_base(model: Model, case: Case) -> Answer:
    rotary = case.part(model, "body").rotary_emb
    size = 2 * rotary.inv_freq.shape[0]
    rotary.inv_freq = 500_000.0 ** -(torch.arange(0, size, 2) / size)
    path = f"{case.path('body')}.rotary_emb"
    return Answer.at(
        path,
        f"{path}/Torch.matmul",
        f"{path}/Tensor.mul#0",
        f"{path}/Tensor.float",
        f"{path}/Tensor.to",
    )


@MORE.add(
    "M16",
    "frequencies of RoPE rounded to bf16",
    on="mistral gpt_neox",
    precisions=("fp32",),
    work=models.far,
)
def coarse_frequencies(model: Model, case: Case) -> Answer:
    rotary = case.part(model, "body").rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16)
    path = f"{case.path('body')}.rotary_emb"
    return Answer.at(
        path,
        f"{path}/Torch.matmul",
        f"{path}/Tensor.mul#0",
        f"{path}/Tensor.float",
        f"{path}/Tensor.to",
    )


# -- benign --------------------------------------------------------------------------------------


@MORE.add(
    "D3",
    "eager attention against SDPA, or the other way round",
    on=DECODERS,
    precisions=(*BOTH, "bf16/bf16"),
    benign=True,
)
def other_attention(model: Model, case: Case) -> None:
    model.set_attn_implementation(
        "sdpa" if model.config._attn_implementation == "eager" else "eager"
    )


@MORE.add(
    "D5",
    "the same weights in fp32 and bf16",
    on=f"{DECODERS} t5",
    precisions=("bf16",),
    benign=True,
)
def half(model: Model, case: Case) -> None:
    pass


@MORE.add("D6", "norm written with a division", on="qwen3 mistral olmo2", benign=True)
def divided(model: Model, case: Case) -> None:
    norm = case.part(model, "norm")

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        # rounded once, at the end: never coarser than any of these models' own
        return (
            norm.weight
            * (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + norm.variance_epsilon))
        ).to(x.dtype)

    norm.forward = forward


@MORE.add("D7", "key and value heads repeated before attention", on="qwen3 mistral", benign=True)
def repeated(model: Model, case: Case) -> None:
    def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat_interleave(times, dim=1)

    attn = case.part(model, "attn")
    attend(attn, with_globals(attention_function(attn), repeat_kv=repeat_kv))
