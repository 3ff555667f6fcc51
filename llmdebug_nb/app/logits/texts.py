"""Logits of an engine's run and of another one, by request and position.

An engine computes rows of several requests in a step, so its steps are those of no other program.
Here each position of a request, of which both programs computed logits after the same tokens, is a
step of its own: request n is generation n, and a position is a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from llmdebug_nb.app.logits.sources import Key, Source, Step, chosen, coarse, problem
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.core.records import Record
from llmdebug_nb.store import by_token
from llmdebug_nb.store.by_token import rows_of
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.sequences import Place, Shared, TokenSequence, shared

ONLY = "of {}'s requests: the other run has no logits after the same tokens"


@dataclass(frozen=True)
class Texts:
    """Both sources, the requests by their number, and how many tokens were left out, by reason.

    ``positions``: by request, all that both computed after the same tokens, logits or not.
    """

    golden: Source
    mine: Source
    requests: tuple[str, ...]
    left_out: Mapping[str, int]
    positions: tuple[tuple[int, ...], ...]


def of_engine(
    golden: Run, mine: Run, at: tuple[str | None, str | None] = (None, None)
) -> Texts | None:
    """Return the logits of two runs of which one is an engine's; None if neither is.

    ``at``: the tensors to take, as in `sources.of_run`. Raises CompareError: no text begins alike,
    or a run has no logits there.
    """
    if not (by_token.is_engine(golden) or by_token.is_engine(mine)):
        return None
    sides = _Rows(golden, at[0]), _Rows(mine, at[1])
    engine = 1 if by_token.is_engine(mine) else 0
    both = shared(sides[0].sequences, sides[1].sequences)
    found: tuple[dict[Key, Step], dict[Key, Step]] = ({}, {})
    for number, pair in enumerate(both):
        for position in pair.positions:
            following = _next(pair, position, engine)
            steps = [
                side.step(sequence, position, following)
                for side, sequence in zip(sides, (pair.golden, pair.mine), strict=True)
            ]
            if steps[0] is not None and steps[1] is not None:
                found[0][number, position], found[1][number, position] = steps[0], steps[1]
    if not found[0]:
        raise CompareError(_none(sides, both))
    total = sum(1 for sequence in sides[engine].sequences for _ in sides[engine].rows(sequence))
    left_out = {ONLY.format(sides[engine].run.label): total - len(found[0])}
    sources = [side.source(steps) for side, steps in zip(sides, found, strict=True)]
    requests = tuple((pair.golden, pair.mine)[engine].label for pair in both)
    positions = tuple(pair.positions for pair in both)
    return Texts(sources[0], sources[1], requests, left_out, positions)


class _Next(NamedTuple):
    """The token behind a position. ``sampled``: it is not known to be of the prompt."""

    token: int | None
    sampled: bool


class _Rows:
    """The logits of a run, row by row. ``at``: the tensor to take."""

    def __init__(self, run: Run, at: str | None) -> None:
        self.run = run
        self.sequences, self._sizes = by_token.sequences(run)
        self._records: dict[Key, Record] = {}
        for key, record in chosen(run, at):  # a second call computes a prompt's log probabilities
            if record.site.call == 0 or key not in self._records:
                self._records[key] = record
        self._last: tuple[int, torch.Tensor] | None = None

    def step(self, sequence: TokenSequence, position: int, following: _Next) -> Step | None:
        """Return the logits of a position; None if none were computed."""
        found = self._row(sequence.places[position])
        if found is None:
            return None
        record, row = found
        token = sequence.tokens[position]
        return Step(
            "decode", (1, 1, record.summary.shape[-1]), torch.tensor([[token or 0]]),
            lambda: self._loaded(record, row), problem(record), following=following.token,
            sampled=following.sampled,
        )  # fmt: skip

    def rows(self, sequence: TokenSequence) -> Iterator[int]:
        """Yield the positions of which logits were computed."""
        return (at for at, place in sequence.places.items() if self._row(place) is not None)

    @property
    def has_logits(self) -> bool:
        return bool(self._records)

    def source(self, steps: dict[Key, Step]) -> Source:
        sites = (record.site for record in self._records.values())
        places = dict.fromkeys(f"{site.path or '(root)'} output[{site.slot}]" for site in sites)
        return Source(self.run.label, ", ".join(places), steps, tuple(coarse(self.run)))

    def _row(self, place: Place) -> tuple[Record, tuple[int, int, int]] | None:
        record = self._records.get(place.step)
        if record is None:
            return None
        row = rows_of(record.summary.shape, self._sizes[place.step], place)
        return None if row is None else (record, row)

    def _loaded(self, record: Record, row: tuple[int, int, int]) -> torch.Tensor:
        """Return a row, ``[1, 1, vocabulary]``; a step's tensor is read once for all its rows."""
        if self._last is None or self._last[0] != record.id:
            self._last = record.id, self.run.load(record)
        item, axis, index = row
        whole = self._last[1] if item < 0 else self._last[1][item : item + 1]
        return whole.narrow(axis, index, 1).reshape(1, 1, -1)


def _next(pair: Shared, position: int, engine: int) -> _Next:
    """Return the token that followed a position: the engine's, or else the other program's."""
    first, second = (pair.mine, pair.golden) if engine else (pair.golden, pair.mine)
    sampled = first.prompt is None or position + 1 >= first.prompt
    for sequence in (first, second):
        token = sequence.tokens.get(position + 1)
        if token is not None:
            return _Next(token, sampled)
    return _Next(None, sampled)


def _none(sides: tuple[_Rows, _Rows], both: list[Shared]) -> str:
    for side in sides:
        if not side.has_logits:
            return (
                f"{side.run.label} has no logits: record the model with its head, or name the"
                " tensor with at= (--at)"
            )
    if both:
        return "no logits of both programs follow the same tokens"
    begins = [str([list(s.tokens.values())[:8] for s in side.sequences[:3]]) for side in sides]
    return (
        f"no text of {sides[1].run.label} begins like one of {sides[0].run.label}: golden's begin"
        f" {begins[0]}, mine's {begins[1]}; give both the same token ids"
    )
