"""What of golden is put in place of mine to prove a finding, and in which layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.paths import any_layer, module_of
from llmdebug_nb.core.records import Record, Site
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.trace_back import back
from llmdebug_nb.replay.in_place import Put, in_place
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs


@dataclass(frozen=True)
class Placed:
    """A tensor of mine, and what makes golden's value of it. ``row``: the row of both."""

    site: Site
    put: Put
    row: Difference


def placed(finding: Finding, rows: Sequence[Difference], runs: Runs) -> list[Placed]:
    """Return the tensors of golden that are put in place of mine's. ``rows``: of the comparison.

    An output takes the other outputs of its call with it. An input is put in wherever the step
    has the same tensor as an input. For a call whose result only one program has, or whose dtype
    in mine can't hold golden's value, it is the next tensor that follows.

    Raises:
        CannotReplay: golden has no values there.
    """
    row = finding.difference
    assert row is not None
    if row.site.phase != "forward":
        raise CannotReplay("a backward pass can't be run again: gradients are not put in place")
    step = [d for d in rows if d.site.key[:4] == row.site.key[:4]]
    following = _Following(step)
    while True:
        both = row.pair.golden is not None and row.pair.mine is not None
        if both and (row.site.role != "input" or row.verdict == "diverged"):
            chosen = _same_input(row, step) if row.site.role == "input" else _same_call(row, step)
            found = [_placed(d, runs) for d in chosen]
            if None not in found:
                return [each for each in found if each is not None]
        row = following.next(row)


def alike(there: Sequence[Placed], rows: Sequence[Difference], runs: Runs) -> list[Placed]:
    """Return the same tensors in the other layers too, where they differ."""
    places = {_any_layer(each.site) for each in there}
    step = there[0].row.site.key[:4]
    found = [
        _placed(d, runs)
        for d in rows
        if d.verdict == "diverged" and d.pair.golden is not None and d.pair.mine is not None
        and d.site.key[:4] == step and _any_layer(d.pair.mine.site) in places
    ]  # fmt: skip
    known = {each.row.index for each in there}
    return [*there, *(one for one in found if one is not None and one.row.index not in known)]


def _any_layer(site: Site) -> tuple[str, int, str, str]:
    return any_layer(site.path), site.call, site.role, site.slot


def _placed(d: Difference, runs: Runs) -> Placed | None:
    """Return golden's value of a row; None if mine's dtype can't hold it. Raises CannotReplay."""
    golden, mine = d.pair.golden, d.pair.mine
    assert golden is not None
    assert mine is not None
    value = runs.golden.load(golden)
    if not _holds(DTYPES[mine.summary.dtype], value, d, runs):
        return None
    return Placed(mine.site, in_place(value, d.pair.fit), d)


def _holds(dtype: torch.dtype, value: torch.Tensor, d: Difference, runs: Runs) -> bool:
    """Tell whether a dtype of mine holds golden's value of a row, within the row's limit."""
    if not (value.is_floating_point() and dtype.is_floating_point):
        return True
    rounding = runs.error(value, value.to(dtype).to(value.dtype))
    return rounding <= max(d.limit or 0.0, torch.finfo(value.dtype).eps)


class _Following:
    """Finds the rows of a step that are made from others. ``step``: its rows."""

    def __init__(self, step: Sequence[Difference]) -> None:
        self._flows = Flow(step, 0), Flow(step, 1)
        self._differing = [
            d
            for d in step
            if d.verdict in ("diverged", "within_noise") and d.pair.golden and d.pair.mine
        ]

    def next(self, row: Difference) -> Difference:
        """Return the first row of both programs that differs and that is made from a row's call.

        Raises CannotReplay.
        """
        both = row.pair.golden is not None and row.pair.mine is not None
        for flow, own, side in zip(
            self._flows, (row.pair.golden, row.pair.mine), ("golden", "mine"), strict=True
        ):
            for d in self._differing if own is not None else ():
                record: Record | None = getattr(d.pair, side)
                if record is None or own is None or (both and d.index <= row.index):
                    continue
                sources, calls = back(flow, record)
                made_by = any(call.key == own.site.key for call in calls)
                if made_by or any(source.id == own.id for source in sources):
                    return d
        raise CannotReplay("no tensor follows from it that both programs have and mine can hold")


def _same_input(row: Difference, step: Sequence[Difference]) -> list[Difference]:
    prints = _fingerprints(row)
    same = [d for d in step if d.site.role == "input" and _fingerprints(d) == prints]
    return same if None not in prints else [row]


def _same_call(row: Difference, step: Sequence[Difference]) -> list[Difference]:
    assert row.pair.mine is not None
    key, role = row.pair.mine.site.key, row.site.role
    return [
        d
        for d in step
        if (d.verdict == "diverged" or d is row)
        and d.pair.golden is not None
        and d.pair.mine is not None
        and (d.pair.mine.site.key, d.pair.mine.site.role) == (key, role)
    ]


def _fingerprints(d: Difference) -> tuple[str | None, str | None]:
    golden, mine = d.pair.golden, d.pair.mine
    return (
        golden.summary.fingerprint if golden else None,
        mine.summary.fingerprint if mine else None,
    )


def of_weights(
    finding: Finding,
    rows: Sequence[Difference],
    runs: Runs,
    every_layer: bool = False,
) -> dict[tuple[str, str], Put]:
    """Return what makes golden's weights of mine's, by path and name in mine.

    ``every_layer``: also of the same module in the other layers.

    Raises:
        CannotReplay: golden's weights were not recorded, and its model is gone.
    """
    if finding.golden is None or finding.mine is None:
        raise CannotReplay("only one program has this module")
    blamed = module_of(finding.golden.path), module_of(finding.mine.path)
    pairs = {blamed: None}
    for d in rows if every_layer else ():
        if d.pair.golden is not None and d.pair.mine is not None:
            pairs[module_of(d.pair.golden.site.path), module_of(d.pair.mine.site.path)] = None
    wanted = any_layer(blamed[0]), any_layer(blamed[1])
    found: dict[tuple[str, str], Put] = {}
    for paths in pairs:
        if (any_layer(paths[0]), any_layer(paths[1])) == wanted:
            found |= _recorded_weights(paths[0], rows, runs) or _live_weights(paths, runs)
    return found


def _recorded_weights(
    path: str, rows: Sequence[Difference], runs: Runs
) -> dict[tuple[str, str], Put]:
    found: dict[tuple[str, str], Put] = {}
    for d in rows:
        golden, mine = d.pair.golden, d.pair.mine
        if golden is None or mine is None or golden.site.role != "weight":
            continue
        if d.verdict == "diverged" and golden.site.path == path:
            value, dtype = runs.golden.load(golden), DTYPES[mine.summary.dtype]
            put = in_place(value, d.pair.fit, not _holds(dtype, value, d, runs))
            found[mine.site.path, mine.site.slot] = put
    return found


def _live_weights(paths: tuple[str, str], runs: Runs) -> dict[tuple[str, str], Put]:
    """Return the weights of golden's live module whose fingerprints differ."""
    prints = runs.golden.fingerprints.get(paths[0], {}), runs.mine.fingerprints.get(paths[1], {})
    names = [
        name
        for name, (kind, fingerprint) in prints[1].items()
        if name in prints[0] and prints[0][name][0] == kind and prints[0][name][1] != fingerprint
    ]
    module = runs.golden_module(paths[0]) if names else None
    if names and module is None:
        raise CannotReplay(
            "golden's weights were not recorded and its model is gone: record golden with "
            "weights=True"
        )
    own = dict(module.named_parameters()) | dict(module.named_buffers()) if module else {}
    return {(paths[1], name): in_place(own[name].detach(), None) for name in names if name in own}
