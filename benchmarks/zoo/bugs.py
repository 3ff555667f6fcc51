"""Real bugs, one function each: it plants the bug in a model and returns the right answer.

The numbers are those of the list that the bugs come from. Number 25, an in-place fusion of
Inductor, is left out because it needs compiled code. 22 and 28 are simulated eagerly, on one
device.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo import models
from zoo.entry import Answer, Case, Zoo
from zoo.models import Model, attend, attention_function, home, rebind, stand_in, with_globals

BUGS = Zoo()
ATTEND = "eager_attention_forward"


@BUGS.add(
    "1", "RoPE interleaved instead of half-split", on="llama qwen2"
)  # nanotron#427, transformers#25199
def interleaved(model: Model, case: Case) -> Answer:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        half = cos.shape[-1] // 2
        cos, sin = (
            x[..., :half].repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim) for x in (cos, sin)
        )
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    rebind(case.part(model, "attn"), apply_rotary_pos_emb=apply_rotary_pos_emb)
    attn = case.path("attn")
    return Answer.at(
        *(
            f"{attn}/*@{name}"
            for name in ("apply_rotary_pos_emb", "rotate_half", "turned", "<genexpr>")
        )
    )


@BUGS.add(
    "3", "positions cast to bf16", on="llama phi3", work=models.far
)  # keras-hub#1494, transformers#29285
def coarse_positions(model: Model, case: Case) -> Answer:
    rotary = case.part(model, "body").rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(x, position_ids.to(torch.bfloat16))
    path = f"{case.path('body')}.rotary_emb"
    return Answer.at(
        f"{path}/Tensor.to@<lambda>", f"{path}/Tensor.float", f"{path}/Tensor.bfloat16"
    )


@BUGS.add(
    "4a", "position off by one once the cache is filled", on="llama qwen2 gpt2"
)  # llama.cpp#23400
def off_by_one(model: Model, case: Case) -> Answer:
    body = case.part(model, "body")
    right = body.forward

    def forward(
        input_ids: torch.Tensor | None = None, past_key_values: Any = None, **given: Any
    ) -> Any:
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if seen and input_ids is not None:
            given["position_ids"] = (torch.arange(input_ids.shape[1]) + seen + 1)[None]
        return right(input_ids=input_ids, past_key_values=past_key_values, **given)

    body.forward = forward
    path = case.path("body")
    reader = (
        f"{path}.wpe" if case.architecture == "gpt2" else f"{path}.rotary_emb"
    )  # is given wrong positions
    return Answer.at(f"{path}/Torch.arange@forward", f"{path}/Tensor.add@forward", reader, step=1)


@BUGS.add(
    "4b", "left padding counted in positions", on="gpt2", work=models.padded
)  # mosaicml/examples#257
def padding_counted(model: Model, case: Case) -> Answer:
    wrong = {"positions": lambda mask: torch.arange(mask.shape[1]).expand_as(mask)}
    return Answer.at("", f"{case.path('body')}", f"{case.path('body')}.wpe", program=wrong)


@BUGS.add(
    "5a",
    "causal mask top-left in SDPA when lengths differ",
    on="qwen2",
    config={"num_key_value_heads": 4},
)  # pytorch#108108
def top_left_sdpa(model: Model, case: Case) -> Answer:
    def sdpa(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        is_causal: bool = False,
        **given: Any,
    ) -> Any:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **given)

    attn = case.part(model, "attn")
    attend(
        attn,
        with_globals(
            attention_function(attn),
            torch=stand_in(torch, "nn.functional.scaled_dot_product_attention", sdpa),
        ),
    )
    return Answer.at(f"{case.path('attn')}/Functional.scaled_dot_product_attention", step=1)


@BUGS.add("5b", "causal mask top-left when lengths differ", on="llama gpt2")  # onnx#8068
def top_left(model: Model, case: Case) -> Answer:
    attn = case.part(model, "attn")
    right = attention_function(attn)

    def aligned(query: torch.Tensor, length: int) -> torch.Tensor:
        mask = torch.full((query.shape[2], length), torch.finfo(query.dtype).min, dtype=query.dtype)
        return mask.triu(1)[None, None]

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any
    ) -> Any:
        if query.shape[2] != key.shape[2]:
            attention_mask = aligned(query, key.shape[2])
        return right(module, query, key, value, attention_mask, **given)

    attend(attn, attention)
    path = case.path("attn")
    return Answer.at(f"{path}/Tensor.add@{ATTEND}", f"{path}/*@aligned", step=1)


@BUGS.add("7", "attention soft-cap dropped", on="gemma2")  # vllm-metal#665, llama.cpp#8156
def no_soft_cap(model: Model, case: Case) -> Answer:
    case.part(model, "attn").attn_logit_softcapping = None
    path = case.path("attn")
    return Answer.at(
        f"{path}/Tensor.div",
        f"{path}/Tensor.truediv",
        f"{path}/*.tanh",
        f"{path}/Tensor.mul@{ATTEND}",
    )


@BUGS.add(
    "8", "query scale without the square root", on="llama qwen2 gpt2"
)  # mlx-swift-examples#99
def wrong_scale(model: Model, case: Case) -> Answer:
    case.part(model, "attn").scaling **= 2
    path = case.path("attn")
    return Answer.at(
        f"{path}/Tensor.mul@{ATTEND}", f"{path}/Functional.scaled_dot_product_attention"
    )


# in bf16 the kernel computes in float32 inside: the same bits as the right program's
@BUGS.add("10", "softmax in bf16", on="llama gemma2", precisions=("fp32",))  # maxtext#1225
def coarse_softmax(model: Model, case: Case) -> Answer:
    def softmax(x: torch.Tensor, dim: int = -1, dtype: Any = None) -> torch.Tensor:
        return F.softmax(x.to(torch.bfloat16), dim=dim)

    attn = case.part(model, "attn")
    attend(
        attn, with_globals(attention_function(attn), nn=stand_in(nn, "functional.softmax", softmax))
    )
    return Answer.at(
        f"{case.path('attn')}/Functional.softmax", f"{case.path('attn')}/Tensor.to@softmax"
    )


def large_scores(model: Model, case: Case) -> None:
    """Make queries and keys of one layer as large as outliers of real models: beyond 65504."""
    attn = case.part(model, "attn")
    with torch.no_grad():
        if hasattr(attn, "c_attn"):
            attn.c_attn.weight[:, :128] *= 200
        else:
            attn.q_proj.weight *= 200
            attn.k_proj.weight *= 200


@BUGS.add(
    "11", "scores overflow fp16", on="llama gpt2", precisions=("fp16",), setup=large_scores
)  # transformers#33317
def overflow(model: Model, case: Case) -> Answer:
    return Answer.at(f"{case.path('attn')}/Torch.matmul#0")


@BUGS.add(
    "13", "norm eps ten times too large", on="llama gpt2 gemma2 mixtral"
)  # llama#771, tvm#15856
def wrong_eps(model: Model, case: Case) -> Answer:
    norm = case.part(model, "norm")
    name = next(name for name in ("variance_epsilon", "eps") if hasattr(norm, name))
    setattr(norm, name, 10 * getattr(norm, name))
    path = case.path("norm")
    return Answer.at(
        path, f"{path}/Tensor.add", f"{path}/Torch.rsqrt", f"{path}/Functional.layer_norm"
    )


@BUGS.add("15a", "(1 + w) norm computed in bf16", on="gemma2 gemma3")  # transformers#29402
def coarse_norm(model: Model, case: Case) -> Answer:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        output = self._norm(x.float()).to(torch.bfloat16) * (1.0 + self.weight.to(torch.bfloat16))
        return output.type_as(x)

    norm = case.part(model, "norm")
    norm.forward = types.MethodType(forward, norm)
    path = case.path("norm")
    return Answer.at(
        *(f"{path}/Tensor.{op}@forward" for op in ("mul", "to", "add", "radd", "float"))
    )


# in bf16 the right program rounds it as well
@BUGS.add(
    "15b", "embedding scale rounded to bf16", on="gemma2 gemma3", precisions=("fp32",)
)  # litgpt#1031
def coarse_scale(model: Model, case: Case) -> Answer:
    embed = case.part(model, "embed")
    embed.embed_scale = embed.embed_scale.to(torch.bfloat16).float()
    return Answer.at(case.path("embed"), f"{case.path('embed')}/Tensor.mul")


@BUGS.add(
    "17", "gate and up split at the wrong boundary", on="phi3 llama mixtral"
)  # Megatron PR#520
def wrong_split(model: Model, case: Case) -> Answer:
    """Split the fused weight between two ranks first, and each half into gate and up then."""
    mlp, path = case.part(model, "mlp"), case.path("mlp")

    def halves(fused: torch.Tensor) -> torch.Tensor:
        a, b, c, d = fused.data.chunk(4, dim=-2)
        return torch.cat((a, c, b, d), dim=-2)

    if hasattr(mlp, "gate_up_proj"):
        mlp.gate_up_proj.weight.data = halves(mlp.gate_up_proj.weight)
        return Answer.at(f"{path}.gate_up_proj", f"{path}.gate_up_proj/*")
    if hasattr(mlp, "experts"):
        mlp.experts.gate_up_proj.data = halves(mlp.experts.gate_up_proj)
        return Answer.at(
            f"{path}.experts",
            f"{path}.experts/Functional.linear",
            f"{path}.experts/Torch.*_mm*",
            f"{path}.experts/*_mm*",
        )
    fused = halves(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = fused.chunk(2)
    return Answer.at(
        *(f"{path}.{name}{op}" for name in ("gate_proj", "up_proj") for op in ("", "/*"))
    )


@BUGS.add("18", "QKV in the wrong order", on="gpt2 phi3")  # ChatLearn#277, tt-mlir#8973
def wrong_qkv(model: Model, case: Case) -> Answer:
    """Join the [q k v] shards of two ranks, though the whole weight is [q k v] itself."""
    attn = case.part(model, "attn")
    name = "c_attn" if case.architecture == "gpt2" else "qkv_proj"
    fused = getattr(attn, name)
    if case.architecture == "gpt2":  # its weight is transposed
        fused.weight.data = torch.cat(_by_rank(fused.weight.data.T, [64, 64, 64])).T.contiguous()
        fused.bias.data = torch.cat(_by_rank(fused.bias.data, [64, 64, 64]))
    else:
        fused.weight.data = torch.cat(_by_rank(fused.weight.data, [64, 32, 32]))
    return Answer.at(f"{case.path('attn')}.{name}", f"{case.path('attn')}.{name}/*")


def _by_rank(fused: torch.Tensor, sizes: list[int], ranks: int = 2) -> list[torch.Tensor]:
    parts = [part.chunk(ranks) for part in fused.split(sizes)]
    return [part[rank] for rank in range(ranks) for part in parts]


@BUGS.add(
    "20", "lm_head not tied to the embedding", on="llama gpt2", config={"tie_word_embeddings": True}
)  # transformers#43429
def untied(model: Model, case: Case) -> Answer:
    head = case.part(model, "head")
    weight = (
        torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(case.seed)) * 0.12
    )
    head.weight = nn.Parameter(weight.to(head.weight.dtype))
    return Answer.at(case.path("head"), f"{case.path('head')}/*")


def hadamard(size: int) -> torch.Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / size**0.5


def quantise(attn: Any, forgets: bool = False) -> None:
    """Keep rotated keys in 8 bits, as llama.cpp. ``forgets``: write single tokens unrotated."""
    rope = home(attn)["apply_rotary_pos_emb"]
    turn = {dtype: hadamard(attn.head_dim).to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def write(k: torch.Tensor) -> torch.Tensor:
        if not (forgets and k.shape[2] == 1):
            k = torch.matmul(k, turn[k.dtype])
        scale = k.abs().amax(-1, keepdim=True) / 127
        return torch.round(k / scale) * scale

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, **given: Any) -> Any:
        q, k = rope(q, k, cos, sin, **given)
        return torch.matmul(q, turn[q.dtype]), write(k)

    rebind(attn, apply_rotary_pos_emb=apply_rotary_pos_emb)


def quantised(model: Model, case: Case) -> None:
    for n in range(models.LAYERS):
        quantise(case.part(model, "attn", n))


@BUGS.add(
    "22", "rotation missing on one path into a quantised cache", on="llama qwen2", setup=quantised
)  # llama.cpp#25382
def unrotated(model: Model, case: Case) -> Answer:
    quantise(case.part(model, "attn"), forgets=True)
    return Answer.at(f"{case.path('attn')}/*@write", step=1)


@BUGS.add("23", "dropout left on", on="llama qwen2 gpt2")  # pytorch#124464, timm#1978
def dropout_on(model: Model, case: Case) -> Answer:
    if case.architecture == "gpt2":
        case.part(model, "mlp").dropout.train()
        return Answer.at(f"{case.path('mlp')}.dropout", f"{case.path('mlp')}.dropout/*")
    attn = case.part(model, "attn")
    attn.training, attn.attention_dropout = True, 0.1
    path = case.path("attn")
    return Answer.at(
        f"{path}/Functional.dropout", f"{path}/Functional.scaled_dot_product_attention"
    )


@BUGS.add(
    "28a", "gradient accumulation as mean of means", on="llama gpt2", work=models.train
)  # hf/blog#2414
def mean_of_means(model: Model, case: Case) -> Answer:
    def loss(model: Model, labels: torch.Tensor, count: int, parts: int) -> torch.Tensor:
        return model(labels.clamp(min=3), labels=labels, use_cache=False).loss / parts

    return Answer.at(
        "*Functional.cross_entropy",
        "*Tensor.div@fixed_cross_entropy",
        modules=("",),
        program={"loss": loss},
    )


def sharded_norm(norm: Any, reduced: bool = True) -> None:
    """Norm each half of the sequence alone, as two ranks do.

    Unless ``reduced``, only the first rank's gradient counts.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        weights = (norm.weight, norm.weight if reduced else norm.weight.detach())
        return torch.cat(
            [normed(part, weight) for part, weight in zip(x.chunk(2, dim=1), weights, strict=True)],
            dim=1,
        )

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        ).to(x.dtype)

    norm.forward = forward


def sharded(model: Model, case: Case) -> None:
    sharded_norm(case.part(model, "final"))


@BUGS.add(
    "28b",
    "gradient of a replicated norm not reduced",
    on="llama qwen2",
    work=models.train,
    setup=sharded,
)  # Megatron#1446
def not_reduced(model: Model, case: Case) -> Answer:
    sharded_norm(case.part(model, "final"), reduced=False)
    return Answer.at(
        case.path("final"), f"{case.path('final')}/Tensor.mul*@normed", phase="backward"
    )
