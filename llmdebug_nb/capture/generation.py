"""Watching Hugging Face's `generate`: when one begins and ends, and how many tokens it prepares each call for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.listeners import Listeners

# the arguments that carry one row a token; a decoder's own come before its encoder's
ROWS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


class Listener(Protocol):
    """Who is told. ``follow(model)``: the root that a `generate` of this model concerns, or None."""

    def follow(self, model: torch.nn.Module) -> torch.nn.Module | None: ...
    def enter(self, root: torch.nn.Module, prompt: int | None) -> Any: ...
    def announce(self, generation: Any, total: int, query: int | None) -> None: ...
    def leave(self, root: torch.nn.Module) -> None: ...


def _wrap(mixin: Any) -> Callable[[], None]:
    original = mixin.generate

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for listener in listeners:
                root = listener.follow(model)
                if root is not None:
                    stack.enter_context(
                        _Watched(listener, root, model, _prompt(model, args, kwargs))
                    )
            return original(model, *args, **kwargs)

    mixin.generate = generate
    return lambda: setattr(mixin, "generate", original)


class _Watched:
    """A running `generate`, with `prepare_inputs_for_generation` of its model announcing each call."""

    def __init__(
        self, listener: Listener, root: torch.nn.Module, model: Any, prompt: int | None
    ) -> None:
        self._listener, self._root, self._model, self._prompt = listener, root, model, prompt

    def __enter__(self) -> None:
        told = self._listener, self._listener.enter(self._root, self._prompt)
        with _lock:
            preparing = _preparing.get(id(self._model))
            if preparing is None:
                preparing = _preparing[id(self._model)] = _Preparing(self._model)
            preparing.told.setdefault(threading.get_ident(), []).append(told)

    def __exit__(self, *_: object) -> None:
        with _lock:
            preparing, thread = _preparing[id(self._model)], threading.get_ident()
            preparing.told[thread].pop()
            if not preparing.told[thread]:
                del preparing.told[thread]
            if not preparing.told:
                _preparing.pop(id(self._model)).restore()
        self._listener.leave(self._root)


class _Preparing:
    """`prepare_inputs_for_generation` of a model while any thread generates with it. ``told``: by thread, who is told of its calls, and of which
    generation; the innermost last."""

    def __init__(self, model: Any) -> None:
        self.told: dict[int, list[tuple[Listener, Any]]] = {}
        self._model, self._before = model, vars(model).get("prepare_inputs_for_generation")
        original = model.prepare_inputs_for_generation

        @functools.wraps(original)
        def prepare(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            inputs = original(input_ids, *args, **kwargs)
            with torch_modes.unseen():
                total = rows(input_ids)
                query = next(
                    (sizes[1] for sizes in map(rows, map(inputs.get, ROWS)) if sizes), None
                )
            innermost = {id(told[0]): told for told in self.told.get(threading.get_ident(), ())}
            for listener, generation in innermost.values() if total else ():
                listener.announce(generation, total[1], query)  # type: ignore[index]
            return inputs

        model.prepare_inputs_for_generation = prepare

    def restore(self) -> None:
        if self._before is None:
            vars(self._model).pop("prepare_inputs_for_generation", None)
        else:
            self._model.prepare_inputs_for_generation = self._before


_preparing: dict[int, _Preparing] = {}  # by id of the model
_lock = threading.RLock()
# also if transformers is only imported later
listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_generation_mixin(_wrap))


def rows(value: Any) -> tuple[int, int] | None:
    """Return batch and token count of something like ``[batch, token, ...]``, else None."""
    if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() < 2:
        return None
    return int(value.shape[0]), int(value.shape[1])


def _prompt(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the prompt length that `generate` was given, or None where its first call will tell."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    given = next(
        (v for v in (kwargs.get("inputs"), kwargs.get("input_ids"), *args[:1]) if v is not None),
        None,
    )
    with torch_modes.unseen():
        sizes = rows(given)
    return sizes[1] if sizes else None
