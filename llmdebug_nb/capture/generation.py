"""Watching Hugging Face's `generate`: its beginning and end, and the tokens of each call in it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.core import interrupts

# arguments with one row per token; a decoder's own come before its encoder's
TOKEN_ARGUMENTS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


@dataclass
class RunningGenerate:
    """A `generate` that is under way.

    ``prompt``: its length in tokens, None if only the first call shows it. ``step``: of the last
    call. ``announced``: of the next call, the count of prompt and generated tokens, and of rows.
    """

    number: int
    prompt: int | None
    step: int | None = None
    announced: tuple[int, int | None] | None = None


class GenerateListener(Protocol):
    """Follows `generate`. ``follow(model)``: the root that a `generate` of this model concerns."""

    def follow(self, model: torch.nn.Module) -> torch.nn.Module | None: ...
    def enter(self, root: torch.nn.Module, prompt: int | None) -> RunningGenerate: ...
    def announce(self, generate: RunningGenerate, total: int, query: int | None) -> None: ...
    def leave(self, root: torch.nn.Module) -> None: ...


_Running = tuple[GenerateListener, RunningGenerate]


def _wrap(mixin: type) -> Callable[[], None]:
    original = mixin.generate  # type: ignore[attr-defined]

    @functools.wraps(original)
    def generate(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            for listener in listeners:
                root = listener.follow(model)
                if root is not None:
                    prompt = _prompt_length(model, args, kwargs)
                    watched = _Watched(listener, root, model, prompt)
                    stack.push(watched)  # first: an interrupt may come right after `begin`
                    watched.begin()
            return original(model, *args, **kwargs)

    mixin.generate = generate  # type: ignore[attr-defined]
    return lambda: setattr(mixin, "generate", original)


class _Watched:
    """The context of a running `generate`, for one listener."""

    def __init__(
        self,
        listener: GenerateListener,
        root: torch.nn.Module,
        model: torch.nn.Module,
        prompt: int | None,
    ) -> None:
        self._listener, self._root, self._model, self._prompt = listener, root, model, prompt
        self._begun = False

    def __enter__(self) -> None:
        self.begin()

    @interrupts.unbroken
    def begin(self) -> None:
        running = self._listener, self._listener.enter(self._root, self._prompt)
        self._begun = True
        with _lock:
            preparation = _preparations.get(id(self._model))
            if preparation is None:
                preparation = _preparations[id(self._model)] = _Preparation(self._model)
            preparation.running.setdefault(threading.get_ident(), []).append(running)

    @interrupts.unbroken
    def __exit__(self, *_: object) -> None:
        if not self._begun:
            return
        with _lock:
            preparation, thread = _preparations[id(self._model)], threading.get_ident()
            preparation.running[thread].pop()
            if not preparation.running[thread]:
                del preparation.running[thread]
            if not preparation.running:
                _preparations.pop(id(self._model)).restore()
        self._listener.leave(self._root)


class _Preparation:
    """Wraps `prepare_inputs_for_generation` of a model while any thread generates with it.

    ``running``: by thread, each `generate` with its listener, the innermost last.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.running: dict[int, list[_Running]] = {}
        self._model, self._before = model, vars(model).get("prepare_inputs_for_generation")
        original: Any = model.prepare_inputs_for_generation

        @functools.wraps(original)
        def prepare(input_ids: torch.Tensor, *args: object, **kwargs: object) -> object:
            inputs = original(input_ids, *args, **kwargs)
            sizes, query = torch_modes.run_unseen(_sizes_of, input_ids, inputs)
            if sizes is not None:
                here = self.running.get(threading.get_ident(), ())
                innermost = {id(listener): (listener, generate) for listener, generate in here}
                for listener, generate in innermost.values():
                    listener.announce(generate, sizes[1], query)
            return inputs

        model.prepare_inputs_for_generation = prepare  # type: ignore[assignment]

    def restore(self) -> None:
        if self._before is None:
            vars(self._model).pop("prepare_inputs_for_generation", None)
        else:
            self._model.prepare_inputs_for_generation = self._before


_preparations: dict[int, _Preparation] = {}  # by id of the model
_lock = threading.RLock()
# also works if transformers is only imported later
listeners: Listeners[GenerateListener] = Listeners(lambda: pytorch.with_generation_mixin(_wrap))


def batch_and_tokens(value: object) -> tuple[int, int] | None:
    """Return the sizes of something like ``[batch, token, ...]``, otherwise None."""
    if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() < 2:
        return None
    return int(value.shape[0]), int(value.shape[1])


def _sizes_of(
    input_ids: torch.Tensor, inputs: Mapping[str, object]
) -> tuple[tuple[int, int] | None, int | None]:
    """Return batch and tokens so far, and how many tokens the next call is given."""
    candidates = (batch_and_tokens(inputs.get(name)) for name in TOKEN_ARGUMENTS)
    query = next((candidate[1] for candidate in candidates if candidate), None)
    return batch_and_tokens(input_ids), query


def _prompt_length(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> int | None:
    """Return the prompt length of a `generate`, or None if only its first call shows it."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    candidates = (kwargs.get("inputs"), kwargs.get("input_ids"), *args[:1])
    prompt = next((value for value in candidates if value is not None), None)
    sizes = torch_modes.run_unseen(batch_and_tokens, prompt)
    return sizes[1] if sizes else None
