"""Logits of a live model that is given golden's tokens."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.app.logits.sources import Key, Source, Step
from llmdebug_nb.capture import generation
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import CompareError, first_line
from llmdebug_nb.core.interrupts import Unbroken
from llmdebug_nb.replay.execution import quiet
from llmdebug_nb.replay.swap import restored

if TYPE_CHECKING:
    from collections.abc import Callable

ENCODER = "encoder"


def of_model(model: torch.nn.Module, golden: Source, progress: bool = True) -> Source:
    """Return what a model computes when it is given the tokens of golden's steps.

    It is called as golden was: a prompt, then token by token with its cache, if it gives one
    (``past_key_values``); else with all tokens so far. Model and random numbers are left unchanged.

    Raises:
        CompareError: golden's tokens were not recorded, or the model fails on them.
    """
    if any(True for _ in generation.listeners):
        raise CompareError("a recording is running: end it first, or it would record this too")
    name = type(model).__name__
    known = {key: step for key, step in golden.steps.items() if step.ids is not None}
    if not known:
        raise CompareError(
            f"{golden.name} does not hold the tokens that {name} would be given: record the whole"
            " model, with its inputs (part='both'), not logits alone"
        )
    if any(step.kind == ENCODER for step in known.values()):
        raise CompareError(
            f"{golden.name} is of an encoder and a decoder, which can't be fed: record {name} too"
        )
    steps: dict[Key, Step] = {}
    bar = progress_bar(total=len(known), desc=f"feeding {name}", unit="step", shown=progress)
    with bar, Unbroken(restored(model), quiet()):
        for key, logits in _fed(model, known):
            steps[key] = _held(known[key], logits)
            bar.update()
    notes = [f"{name} was given {golden.name}'s tokens"]
    if any(part.training for part in model.modules()):
        notes.append(f"{name} is in training mode: dropout may change its logits (model.eval())")
    return Source(name, "its logits", steps, tuple(notes))


def _held(step: Step, logits: torch.Tensor) -> Step:
    shape = logits.shape[0], logits.shape[1], logits.shape[2]
    return Step(step.kind, shape, step.ids, lambda: logits)


def _fed(model: torch.nn.Module, steps: Mapping[Key, Step]) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield the logits of each step, as many rows as golden has."""
    by_generation: dict[int, list[Key]] = defaultdict(list)
    for key in steps:
        by_generation[key[0]].append(key)
    for keys in by_generation.values():
        feeding = _Feeding(model)
        for key in keys:
            yield key, feeding.logits(steps[key])


class _Feeding:
    """Gives a model the steps of one generation."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        parameter = next(model.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._accepted = _accepted(model.forward)
        self._cache: object = None
        self._seen: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None

    def logits(self, step: Step) -> torch.Tensor:
        """Return [sequences, rows, vocabulary]. Raises CompareError."""
        assert step.ids is not None
        ids, more = step.ids, dict(step.inputs)
        if step.cached and self._seen is not None and self._cache is None:
            ids = torch.cat([self._seen, ids], -1)
            if "position_ids" in more and self._positions is not None:
                more["position_ids"] = torch.cat([self._positions, more["position_ids"]], -1)
        if step.cached and self._cache is None:
            self._seen, self._positions = ids, more.get("position_ids")
        output = self._call(ids, more, step.cached)
        logits = _logits_of(output)
        if step.cached:
            self._cache = getattr(output, "past_key_values", None)
        if logits is None:
            kind = type(self._model).__name__
            raise CompareError(f"{kind} gives no logits: expected a tensor, or one named logits")
        return logits[:, -step.shape[1] :].cpu()

    def _call(self, ids: torch.Tensor, more: dict[str, torch.Tensor], cached: bool) -> object:
        given: dict[str, object] = {
            name: tensor.to(self._device) for name, tensor in more.items() if name in self._accepted
        }
        if cached and self._cache is not None:
            given["past_key_values"] = self._cache
        if cached and "use_cache" in self._accepted:
            given["use_cache"] = True
        try:
            return self._model(ids.to(self._device), **given)
        except Exception as error:  # the model is the program's: it may raise anything
            raise CompareError(
                f"{type(self._model).__name__} fails on golden's tokens:"
                f" {type(error).__name__}: {first_line(error)}"
            ) from None


def _accepted(function: Callable[..., object]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _logits_of(output: object) -> torch.Tensor | None:
    """Return the logits of a model's output, [sequences, rows, vocabulary]; None if it has none."""
    found: object = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif not isinstance(output, torch.Tensor):
        first = output[0] if isinstance(output, (tuple, list)) and output else None
        found = getattr(output, "logits", first)
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or not found.dim():
        return None
    return (
        found.reshape(-1, *found.shape[-2:])
        if found.dim() > 2
        else found.reshape(1, -1, found.shape[-1])
    )
