"""Tiny random-weight Hugging Face models, and what is done with them while they are recorded.

The random weights have the scale of trained ones. With the initialisation of the configurations,
attention would be uniform and norms would change nothing, and half of the bugs would not show.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

transformers.logging.set_verbosity_error()
LAYERS, VOCABULARY, PROMPT, DECODE = 3, 96, 8, 2
Model = Any
_STYLE = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER: dict[str, Any] = {
    **_STYLE,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 16384,
}
_GPT2 = {**_STYLE, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
_T5 = {
    **_STYLE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": LAYERS,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


class Architecture(NamedTuple):
    """``config``, ``model``: classes of transformers. Other fields: paths of parts."""

    config: str
    model: str
    attention: str
    settings: dict[str, Any]
    body: str = "model"
    layer: str = "model.layers.{n}"
    attn: str = "self_attn"
    mlp: str = "mlp"
    norm: str = "input_layernorm"  # the one before attention
    final: str = "model.norm"
    embed: str = "model.embed_tokens"
    head: str = "lm_head"

    @classmethod
    def of(
        cls, kind: str, attention: str, settings: dict[str, Any] | None = None, **named: str
    ) -> Architecture:
        """Return one whose settings and names are those of most decoders, but for what is given."""
        names: dict[str, Any] = {"config": f"{kind}Config", "model": f"{kind}ForCausalLM", **named}
        return cls(attention=attention, settings={**_DECODER, **(settings or {})}, **names)


_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4, "hidden_size": 72}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}
_GPT2_NAMES = {
    "body": "transformer",
    "layer": "transformer.h.{n}",
    "attn": "attn",
    "norm": "ln_1",
    "final": "transformer.ln_f",
    "embed": "transformer.wte",
}
_NEOX_NAMES = {
    "body": "gpt_neox",
    "layer": "gpt_neox.layers.{n}",
    "attn": "attention",
    "final": "gpt_neox.final_layer_norm",
    "embed": "gpt_neox.embed_in",
    "head": "embed_out",
}
_T5_NAMES = {
    "body": "decoder",
    "layer": "decoder.block.{n}",
    "attn": "layer.0.SelfAttention",
    "mlp": "layer.2.DenseReluDense",
    "norm": "layer.0.layer_norm",
    "final": "decoder.final_layer_norm",
    "embed": "shared",
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture.of("Llama", "eager"),
    "qwen2": Architecture.of("Qwen2", "sdpa"),
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", "eager", _GPT2, **_GPT2_NAMES),
    "gemma2": Architecture.of("Gemma2", "eager", {**_GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": Architecture.of("Gemma3", "eager", _GEMMA, config="Gemma3TextConfig"),
    "mixtral": Architecture.of("Mixtral", "sdpa", _EXPERTS),
    "phi3": Architecture.of("Phi3", "eager"),
    # those of `more.py`
    "gpt_neox": Architecture.of("GPTNeoX", "eager", {"num_key_value_heads": None}, **_NEOX_NAMES),
    "olmo2": Architecture.of("Olmo2", "sdpa", norm="post_attention_layernorm"),
    "qwen3": Architecture.of("Qwen3", "eager", {"head_dim": 16}),
    "mistral": Architecture.of("Mistral", "eager", {"sliding_window": 4}),
    "qwen2_moe": Architecture.of("Qwen2Moe", "eager", _QWEN_EXPERTS),
    "starcoder2": Architecture.of("Starcoder2", "sdpa"),
    "t5": Architecture("T5Config", "T5ForConditionalGeneration", "eager", _T5, **_T5_NAMES),
}  # fmt: skip


def build(name: str, seed: int, **changes: Any) -> Model:
    """Return the model in float32, in evaluation mode. ``changes``: of its configuration."""
    architecture = ARCHITECTURES[name]
    settings = {
        key: value
        for key, value in {**architecture.settings, **changes}.items()
        if value is not None
    }
    config = getattr(transformers, architecture.config)(
        **settings, attn_implementation=architecture.attention
    )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture.model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that are all one and biases that are all zero hide bugs
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def cast(model: Model, dtype: torch.dtype) -> Model:
    """Convert the parameters in place; buffers stay, as when a checkpoint is loaded so."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


# -- changing one model, and no other ------------------------------------------------------------


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return the function with other values for some of the global names that it uses."""
    function = inspect.unwrap(function)
    scope = {**function.__globals__, **names}
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def rebind(module: torch.nn.Module, **names: Any) -> None:
    """Give one module a forward of its own in which some global names mean something else."""
    module.forward = types.MethodType(with_globals(type(module).forward, **names), module)


def home(module: torch.nn.Module) -> dict[str, Any]:
    """Return the global names that the module's forward uses."""
    return inspect.unwrap(type(module).forward).__globals__


class Interface(NamedTuple):
    """Stands for transformers' table of attention functions: always this one."""

    function: Callable[..., Any]

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        return self.function


def attention_function(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that computes the module's attention."""
    names = home(module)
    return names["ALL_ATTENTION_FUNCTIONS"].get_interface(
        module.config._attn_implementation, names.get("eager_attention_forward")
    )


def attend(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Let one module compute its attention by another function."""
    rebind(module, ALL_ATTENTION_FUNCTIONS=Interface(function))


class _StandIn:
    """A namespace with one name that means something else."""

    def __init__(self, original: Any, name: str, value: Any) -> None:
        self._original = original
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def stand_in(original: Any, path: str, value: Any) -> Any:
    """Return a copy of the namespace ``original`` with another value at a dotted ``path``."""
    name, _, rest = path.partition(".")
    return _StandIn(
        original, name, stand_in(getattr(original, name), rest, value) if rest else value
    )


# -- the work ------------------------------------------------------------------------------------
# what a program does with its model: what is wrong there, not in the model, comes as a keyword


def tokens(seed: int, batch: int = 1, length: int = PROMPT + DECODE) -> torch.Tensor:
    """Return token ids [batch, length]; the first rows are the same for every ``batch``."""
    rows = [
        torch.randint(
            3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(100 * seed + row)
        )
        for row in range(batch)
    ]
    return torch.cat(rows)


@torch.no_grad()
def encode(model: Model, seed: int) -> None:
    """One pass of an encoder and a decoder."""
    ids = tokens(seed)
    model(input_ids=ids[:, :PROMPT], decoder_input_ids=ids[:, PROMPT - 3 :], use_cache=False)


@torch.no_grad()
def decode(model: Model, seed: int, batch: int = 1) -> None:
    """Prefill (step 0), then one fixed token at a time (steps 1, 2), whatever the model chooses.

    A model with an encoder makes one pass instead.
    """
    if hasattr(model, "encoder"):
        encode(model, seed)
        return
    ids = tokens(seed, batch)
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    for at in range(PROMPT, PROMPT + DECODE):
        model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)


@torch.no_grad()
def far(model: Model, seed: int) -> None:
    """A prefill at positions 8186 to 8193, where bfloat16 knows only every 32nd number."""
    positions = torch.arange(8186, 8186 + PROMPT)[None]
    model(tokens(seed)[:, :PROMPT], position_ids=positions, use_cache=False)


def places(mask: torch.Tensor) -> torch.Tensor:
    """Return each token's place among those that are no padding."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def padded(
    model: Model, seed: int, positions: Callable[[torch.Tensor], torch.Tensor] = places
) -> None:
    """A prefill of two rows, the first of them padded on the left."""
    ids = tokens(seed, 2)[:, :PROMPT]
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)


def share(model: Model, labels: torch.Tensor, count: int, parts: int) -> torch.Tensor:
    """Return a micro-batch's share of the loss: its sum over the targets of the whole batch."""
    return model(
        labels.clamp(min=3), labels=labels, num_items_in_batch=torch.tensor(count), use_cache=False
    ).loss


def train(model: Model, seed: int, loss: Callable[..., torch.Tensor] = share) -> None:
    """Run forward and backward on two micro-batches with different numbers of targets."""
    labels = [tokens(seed + part, length=PROMPT) for part in range(2)]
    labels[1][:, : PROMPT // 2] = -100
    count = sum(int((row[:, 1:] != -100).sum()) for row in labels)
    for row in labels:
        loss(model, row, count, len(labels)).backward()
    model.zero_grad(set_to_none=True)
