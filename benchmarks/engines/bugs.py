"""Mistakes in how a checkpoint was converted, and in the engine that runs it.

Odd ones are not to be looked at while the comparison is changed: they say how it does on bugs that
it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from ports.entry import Bug
from ports.weights import swap

from engines.families import HEAD, LAYERS, WIDTH

State = dict[str, torch.Tensor]
LAYER, ALL = "model.layers.1", "model.layers.*"
ATTENTION = ("self_attn.attn", "self_attn")


@dataclass(frozen=True)
class Planted:
    """A bug. ``fits``: the model has what it changes. ``engine``: plants it in a live engine.

    ``way``: what has to happen for it to show.
    """

    bug: Bug
    fits: Callable[[State], bool] = lambda state: True
    engine: Callable[[Any], AbstractContextManager[None]] = field(default=lambda llm: nullcontext())
    way: str = "chunked"


def weight(name: str, layer: str = LAYER) -> str:
    return f"{layer}.{name}.weight"


def has(name: str) -> Callable[[State], bool]:
    return lambda state: name in state


def changed(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def convert(state: State) -> None:
        state[name] = how(state[name]).contiguous()

    return convert


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, 2, HEAD // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)


def of_layer_0(state: State) -> None:
    state[weight("self_attn.o_proj")] = state[weight("self_attn.o_proj", "model.layers.0")].clone()


def tied(state: State) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"] / WIDTH**0.5


def permuted(state: State) -> None:
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        state[weight(name)] = interleaved(state[weight(name)]).contiguous()


def at(*modules: str, layer: str = LAYER) -> tuple[str, ...]:
    return tuple(f"{layer}.{path}" for path in modules)


# -- in the engine -------------------------------------------------------------------------------


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def backend_of(llm: Any) -> Any:
    """Return what computes the attention of layer 1."""
    return dict(runner_of(llm).get_model().named_modules())[f"{LAYER}.self_attn.attn"].impl


@contextmanager
def double_scale(llm: Any) -> Iterator[None]:
    backend_of(llm).scale *= 1.2
    yield


@contextmanager
def wrapped_update(llm: Any, change: Callable[..., tuple[Any, ...]]) -> Iterator[None]:
    """Change what layer 1 writes to its cache. ``change``: takes keys, values and slots."""
    backend = backend_of(llm)
    inner = backend.do_kv_cache_update

    def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        key, value, slots = change(key, value, slots)
        inner(layer, key, value, cache, slots)

    backend.do_kv_cache_update = update
    yield


def slots_off(llm: Any) -> AbstractContextManager[None]:
    """Write the second token of each step to the slot of the first."""

    def change(key: Any, value: Any, slots: Any) -> tuple[Any, ...]:
        slots = slots.clone()
        slots[1:2] = slots[:1]
        return key, value, slots

    return wrapped_update(llm, change)


def value_scale(llm: Any) -> AbstractContextManager[None]:
    """Scale cached values by head: a norm behind the attention takes a common factor out."""
    scale = torch.tensor([1.2, 0.9])[:, None]
    return wrapped_update(
        llm, lambda key, value, slots: (key, (value * scale).to(value.dtype), slots)
    )


@contextmanager
def position_after_preemption(llm: Any) -> Iterator[None]:
    """Let a request that began again go on at a position that is one too large.

    Only the difference of two positions matters, so shifting all of them would do nothing.
    """
    runner = runner_of(llm)
    again: set[str] = set()
    inner, forward = runner.execute_model, runner.get_model().forward

    def execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        again.update(getattr(scheduled.scheduled_cached_reqs, "resumed_req_ids", ()))
        return inner(scheduled, *args, **kwargs)

    def shifted(*args: Any, **kwargs: Any) -> Any:
        positions, start = kwargs["positions"].clone(), runner.query_start_loc.np
        for n, request in enumerate(runner.input_batch.req_ids[: runner.input_batch.num_reqs]):
            if request in again and start[n + 1] - start[n] == 1:
                positions[start[n] : start[n + 1]] += 1
        return forward(*args, **kwargs | {"positions": positions})

    runner.execute_model = execute
    runner.get_model().forward = shifted
    yield


PLANTED = (
    Planted(
        Bug(
            "layer_off",
            "a weight is that of the layer before",
            convert=of_layer_0,
            modules=at("self_attn.o_proj"),
        )
    ),
    Planted(
        Bug(
            "key_value",
            "keys and values are swapped",
            convert=swap(weight("self_attn.k_proj"), weight("self_attn.v_proj")),
            modules=at("self_attn.qkv_proj", "self_attn.[kv]_proj"),
        )
    ),
    Planted(
        Bug(
            "rope_base",
            "the base of the rotary embedding is 500,000 for 10,000",
            settings={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            modules=(*at("self_attn.rotary_emb", *ATTENTION, layer=ALL), "model.rotary_emb"),
        )
    ),
    Planted(
        Bug(
            "wrong_eps",
            "eps of the norms is 100 times too large",
            settings={"rms_norm_eps": 1e-3},
            modules=(*at("*norm", "self_attn.[qk]_norm", layer=ALL), "model.norm"),
        )
    ),
    Planted(
        Bug(
            "tied_head",
            "the head has the weight of the embedding",
            convert=tied,
            modules=("lm_head", "logits_processor"),
        ),
        has("lm_head.weight"),
    ),
    Planted(
        Bug(
            "transposed",
            "a square projection is transposed",
            convert=changed(weight("self_attn.o_proj"), lambda rows: rows.T),
            modules=at("self_attn.o_proj"),
        )
    ),
    Planted(
        Bug(
            "missing_bias",
            "the bias of the keys is left out",
            convert=changed(f"{LAYER}.self_attn.k_proj.bias", torch.zeros_like),
            modules=at("self_attn.qkv_proj", "self_attn.k_proj"),
        ),
        has(f"{LAYER}.self_attn.k_proj.bias"),
    ),
    Planted(
        Bug(
            "rope_layout",
            "q and k are ordered for interleaved RoPE",
            convert=permuted,
            modules=at("self_attn.qkv_proj", "self_attn.[qk]_proj"),
        )
    ),
    Planted(
        Bug(
            "norm_not_loaded",
            "a norm has the weight that it was made with",
            convert=changed(
                weight("post_attention_layernorm"),
                lambda values: torch.full_like(values, float(values.mean() > 0.5)),
            ),
            modules=at("post_attention_layernorm"),
        )
    ),
    Planted(
        Bug("slots", "keys and values are written to another slot", modules=at(*ATTENTION)),
        engine=slots_off,
    ),
    Planted(
        Bug("value_scale", "values are scaled when they are cached", modules=at(*ATTENTION)),
        engine=value_scale,
    ),
    Planted(
        Bug("softmax_scale", "the scale before the softmax is too large", modules=at(*ATTENTION)),
        engine=double_scale,
    ),
    Planted(
        Bug(
            "resumed_position",
            "a request that began again goes on at a position that is one too large",
            modules=(
                "",
                "model",
                "model.rotary_emb",
                *at(*ATTENTION, "self_attn.rotary_emb", layer=ALL),
            ),
        ),
        engine=position_after_preemption,
        way="preempted",
    ),
)
assert LAYERS > 1
