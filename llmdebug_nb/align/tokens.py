"""Which row and which tokens of one run's batch are those of the other's: another batch, padding on another side, a cache.

It is read from the token ids that both models were given: each row of golden is looked for in the rows of mine, the
longest run of equal tokens at one distance. Where the two lie alike there is no frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmdebug_nb.align.fit import Fit, Move
from llmdebug_nb.core.records import Record

if TYPE_CHECKING:
    import torch

Load = Callable[[Record], "torch.Tensor"]
_INTEGERS = ("int64", "int32")
_ENOUGH = 0.5  # of the shorter row's tokens


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of golden that are tokens of mine, too: row and first place on both sides, and how many."""

    row: int
    start: int
    my_row: int
    my_start: int
    length: int


@dataclass(frozen=True, slots=True)
class Frame:
    """``golden``, ``mine``: [batch, tokens] of what the models were given. ``runs``: what is in both."""

    golden: tuple[int, int]
    mine: tuple[int, int]
    runs: tuple[Run, ...]

    def fits(
        self, golden: tuple[int, ...], mine: tuple[int, ...], before: Frame | None
    ) -> Iterable[Fit]:
        """Yield ways to bring tensors of these shapes to the same rows and tokens, the likeliest first; other axes stay.

        ``before``: the frame of the generation's first step, which says where the keys of later ones begin.
        """
        if len(golden) != len(mine) or not golden:
            return
        batched = (golden[0], mine[0]) == (self.golden[0], self.mine[0])
        flat = (golden[0], mine[0]) == (
            self.golden[0] * self.golden[1],
            self.mine[0] * self.mine[1],
        )
        if flat and not batched and len(golden) < 3:
            yield self._fit(True, (1,), self.golden, self.mine)
            return
        if not batched and (golden[0], mine[0]) != (1, 1):
            return
        for axes in self._axes(golden, mine):
            keys = None
            if (
                before is not None
                and len(before.runs) == 1
                and before.runs[0].start != before.runs[0].my_start
            ):
                first = before.runs[0]
                keys = next(((a, first.start, first.my_start, golden[a] - first.start) for a in range(1, len(golden))
                             if a not in axes and golden[a] - first.start == mine[a] - first.my_start > 0), None)  # fmt: skip
            if (
                axes
                or keys
                or (
                    batched
                    and (
                        self.golden[0] != self.mine[0] or any(r.row != r.my_row for r in self.runs)
                    )
                )
            ):
                yield self._fit(batched, axes, keys=keys)

    def later(self) -> Frame:
        """Return the frame of a later step that feeds one token a row, the same in both."""
        runs = tuple(Run(r.row, 0, r.my_row, 0, 1) for r in self.runs)
        return Frame((self.golden[0], 1), (self.mine[0], 1), runs)

    def _axes(self, golden: tuple[int, ...], mine: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """Yield what may be the axes of tokens."""
        tokens = self.golden[1], self.mine[1]
        found = tuple(a for a in range(1, len(golden)) if (golden[a], mine[a]) == tokens)
        if tokens[0] != tokens[1]:
            yield found
            return
        if all(
            (r.start, r.my_start, r.length) == (0, 0, tokens[0]) for r in self.runs
        ):  # all tokens, where they are
            yield ()
            return
        for axes in (
            (2, 3) if len(golden) == 4 else (),
            (2,) if len(golden) == 4 else (),
            (1,),
            (),
        ):
            if all(a in found for a in axes):
                yield axes

    def _fit(
        self, batched: bool, axes: tuple[int, ...], golden: tuple[int, int] | None = None, mine: tuple[int, int] | None = None,
        keys: tuple[int, int, int, int] | None = None,
    ) -> Fit:  # fmt: skip
        runs = self.runs if batched else self.runs[:1]
        sides: list[Move] = []
        for which, unflat in ((0, golden), (1, mine)):
            picks = [(r.row, r.start) if which == 0 else (r.my_row, r.my_start) for r in runs]
            starts = None if keys is None else (keys[0], keys[1 + which], keys[3])
            sides.append(_picked(batched, axes, picks, [r.length for r in runs], unflat, starts))
        return Fit(self._says(batched, bool(axes) or keys is not None), (sides[0],), (sides[1],))

    def _says(self, batched: bool, tokens: bool) -> str:
        said = []
        if batched and self.golden[0] != self.mine[0]:
            for name, size, rows in (
                ("golden", self.golden[0], {r.row for r in self.runs}),
                ("mine", self.mine[0], {r.my_row for r in self.runs}),
            ):
                if size > len(rows):
                    said.append(
                        f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, sorted(rows)))} of {size} of {name}'s batch"
                    )
        if tokens and any(
            (r.start, r.my_start) != (0, 0)
            or (r.length, r.length) != (self.golden[1], self.mine[1])
            for r in self.runs
        ):
            r = self.runs[0]
            said.append(f"tokens {_range(r.start, r.length)} of golden against {_range(r.my_start, r.length)} of mine"
                        + ("" if len(self.runs) == 1 else ", and so on for each row"))  # fmt: skip
        return "; ".join(said) or "the rows in another order"


def _range(start: int, length: int) -> str:
    return f"{start}-{start + length - 1}" if length > 1 else str(start)


def _picked(
    batched: bool, axes: tuple[int, ...], picks: list[tuple[int, int]], lengths: list[int],
    unflat: tuple[int, int] | None, keys: tuple[int, int, int] | None,
) -> Move:  # fmt: skip
    def move(x: torch.Tensor) -> torch.Tensor:
        import torch

        x = x if unflat is None else x.reshape(*unflat, *x.shape[1:])
        pieces = []
        for (row, start), length in zip(picks, lengths, strict=True):
            piece = x[row if batched else 0]
            for axis in axes:
                piece = piece.narrow(axis - 1, start, length)
            if keys is not None:
                piece = piece.narrow(keys[0] - 1, keys[1], keys[2])
            pieces.append(piece)
        if len(axes) == 1 and len(pieces) > 1:
            return torch.cat(pieces, dim=axes[0] - 1)
        if len({piece.shape for piece in pieces}) > 1:
            return torch.cat([piece.reshape(-1) for piece in pieces])
        return torch.stack(pieces)

    return move


Masks = tuple["np.ndarray | None", "np.ndarray | None"]


def frame(
    golden: np.ndarray,
    mine: np.ndarray,
    masks: Masks = (None, None),
    rows: dict[int, int] | None = None,
) -> Frame | None:
    """Return how token ids [batch, tokens] lie in others; None if alike, or if a row is in none of the others.

    ``masks``: 0 where a token is padding, of the same shapes. ``rows``: of golden -> of mine, where that is known.
    """
    if golden.shape == mine.shape and np.array_equal(golden, mine) and _same_mask(*masks):
        return None
    runs: list[Run] = []
    free = list(range(len(mine)))
    for row, ids in enumerate(golden):
        found = [(*_longest(ids, mine[other], *(None if m is None else m[i] for m, i in zip(masks, (row, other), strict=True))), other)
                 for other in free if rows is None or rows.get(row) == other]  # fmt: skip
        if not found:
            continue
        length, start, my_start, other = max(found, key=lambda f: (f[0], -f[3]))
        if length:
            runs.append(Run(row, start, other, my_start, length))
            free.remove(other)
    if len(runs) < (min(len(golden), len(mine)) if rows is None else len(rows)):
        return None  # some row is in none: another input
    alike = golden.shape == mine.shape and all(
        (r.row, r.start, r.length) == (r.my_row, r.my_start, golden.shape[1]) for r in runs
    )
    return (
        None
        if alike
        else Frame((golden.shape[0], golden.shape[1]), (mine.shape[0], mine.shape[1]), tuple(runs))
    )


def _same_mask(golden: np.ndarray | None, mine: np.ndarray | None) -> bool:
    return golden is None or mine is None or np.array_equal(golden, mine)


def _longest(
    golden: np.ndarray, mine: np.ndarray, mask: np.ndarray | None, my_mask: np.ndarray | None
) -> tuple[int, int, int]:
    """Return length and both starts of the longest run of equal tokens, the last such one; length 0 if it is too short.

    Nothing but padding may stand beside it where the two overlap: another token is another input, no other layout.
    """
    masks = [
        np.ones(len(ids), bool) if m is None else m != 0
        for ids, m in ((golden, mask), (mine, my_mask))
    ]
    best = (0, 0, 0)
    for shift in range(-len(golden) + 1, len(mine)):
        start, my_start = max(0, -shift), max(0, shift)
        n = min(len(golden) - start, len(mine) - my_start)
        here, there = slice(start, start + n), slice(my_start, my_start + n)
        real = np.flatnonzero(masks[0][here] & masks[1][there])
        if (
            real.size == 0
            or real[-1] - real[0] + 1 != real.size
            or np.any(golden[here][real] != mine[there][real])
        ):
            continue
        best = max(best, (int(real.size), start + int(real[0]), my_start + int(real[0])))
    return best if best[0] >= max(1, _ENOUGH * min(int(m.sum()) for m in masks)) else (0, 0, 0)


class Frames:
    """The frames of two runs, one a step, found when they are first asked for."""

    def __init__(
        self, sides: tuple[list[Record], list[Record]], load: tuple[Load, Load] | None
    ) -> None:
        self._load = load
        self._ids: list[dict[tuple[int, int], list[Record]]] = [{}, {}]
        for place, records in zip(self._ids, sides, strict=True):
            for r in records:
                if (
                    r.site.role == "input"
                    and len(r.summary.shape) == 2
                    and r.summary.dtype in _INTEGERS
                    and r.site.phase == "forward"
                ):
                    place.setdefault((r.site.generation, r.site.step), []).append(r)
        self._found: dict[tuple[int, int], Frame | None] = {}

    def of(self, generation: int, step: int) -> Frame | None:
        """Return how the two lie in a step; None if alike, or if nothing says."""
        key = generation, step
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def _find(self, key: tuple[int, int]) -> Frame | None:
        given = [side.get(key, []) for side in self._ids]
        if self._load is None or not all(given):
            return None
        ids = [self._read(next((r for r in found if "position" not in r.site.slot and "mask" not in r.site.slot), None), side)
               for side, found in enumerate(given)]  # fmt: skip
        if ids[0] is None or ids[1] is None:
            return None
        masks = [self._read(next((r for r in found if "attention_mask" in r.site.slot and r.summary.shape == x.shape), None), side)
                 for side, (found, x) in enumerate(zip(given, ids, strict=True)) if x is not None]  # fmt: skip
        first = self.of(key[0], 0) if key[1] else None
        return frame(
            ids[0],
            ids[1],
            (masks[0], masks[1]),
            None if first is None else {r.row: r.my_row for r in first.runs},
        )

    def _read(self, record: Record | None, side: int) -> np.ndarray | None:
        if (
            record is None
            or record.payload is None
            or record.kept is not None
            or self._load is None
        ):
            return None
        return np.asarray(self._load[side](record).numpy())
