"""What of golden is put in place of mine to prove a finding, and in which layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.core.findings import Difference, Finding, Fit
from llmdebug_nb.core.records import Site
from llmdebug_nb.explain.flow import Flow, back
from llmdebug_nb.explain.runs import CannotReplay, Runs

Put = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Placed:
    """A tensor of mine, and what makes golden's value of it. ``row``: the row of both."""

    site: Site
    put: Put
    row: Difference


def placed(finding: Finding, rows: Sequence[Difference], runs: Runs) -> list[Placed]:
    """Return the tensors of golden that are put in place of mine's. ``rows``: of the comparison.

    An output takes the other outputs of its call with it. An input is put in wherever the step
    has the same tensor as an input. For a call that only one program makes it is the next tensor
    that both have.

    Raises:
        CannotReplay: golden has no values there, or they can't be brought into mine's layout.
    """
    row = finding.difference
    assert row is not None
    if row.site.phase != "forward":
        raise CannotReplay("a backward pass can't be run again: gradients are not put in place")
    step = [d for d in rows if d.site.key[:4] == row.site.key[:4]]
    both = row.pair.golden is not None and row.pair.mine is not None
    if not both or (row.site.role == "input" and row.verdict != "diverged"):
        row = _next_of_both(row, step)
    chosen = _same_input(row, step) if row.site.role == "input" else _same_call(row, step)
    result = []
    for d in chosen:
        golden, mine = d.pair.golden, d.pair.mine
        assert golden is not None
        assert mine is not None
        result.append(Placed(mine.site, in_place(runs.golden.load(golden), d.pair.fit), d))
    return result


def in_place(golden: torch.Tensor, fit: Fit | None) -> Put:
    """Return what makes mine's tensor of golden's: in mine's layout, dtype and device.

    Where golden's tensor answers to a part of mine's, the rest stays as it is. The result raises
    CannotReplay if the layout can't be turned round.
    """

    def put(own: torch.Tensor) -> torch.Tensor:
        if fit is None:
            if own.shape != golden.shape:
                shapes = f"{list(golden.shape)} against {list(own.shape)}"
                raise CannotReplay(f"golden's tensor has another shape: {shapes}")
            return golden.to(own.device, own.dtype)
        # the fit brings the numbers of mine's elements to where golden's values lie
        numbers = torch.arange(own.numel()).reshape(own.shape)
        values, places = fit(golden, numbers)
        once = places.is_floating_point() or _repeats(places)
        if once or values.shape != places.shape:
            raise CannotReplay(f"golden's layout can't be turned round: {fit.says}")
        new = own.detach().clone(memory_format=torch.contiguous_format)
        flat = places.reshape(-1).to(own.device)
        new.view(-1)[flat] = values.reshape(-1).to(own.device, own.dtype)
        return new

    return put


def _repeats(numbers: torch.Tensor) -> bool:
    ordered = numbers.reshape(-1).sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def _next_of_both(row: Difference, step: Sequence[Difference]) -> Difference:
    """Return the first row of both programs that differs and that the call of a row leads to."""
    for side, own in enumerate((row.pair.golden, row.pair.mine)):
        if own is None:
            continue
        flow = Flow(step, side)
        for d in step:
            record = d.pair.mine if side else d.pair.golden
            if d.verdict != "diverged" or not d.pair.golden or not d.pair.mine or record is None:
                continue
            _, calls = back(flow, record)
            if any(call.key == own.site.key for call in calls):
                return d
    raise CannotReplay("no tensor that both programs have follows from it")


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
    golden_module: Callable[[str], torch.nn.Module | None],
) -> dict[tuple[str, str], Put]:
    """Return what makes golden's weights of mine's, by path and name in mine.

    Raises:
        CannotReplay: golden's weights were not recorded, and its model is gone.
    """
    source, own = finding.golden, finding.mine
    if source is None or own is None:
        raise CannotReplay("only one program has this module")
    paths = source.path.partition("/")[0], own.path.partition("/")[0]
    found: dict[tuple[str, str], Put] = {}
    for d in rows:
        golden, mine = d.pair.golden, d.pair.mine
        if golden is None or mine is None or golden.site.role != "weight":
            continue
        if d.verdict == "diverged" and golden.site.path == paths[0]:
            put = in_place(runs.golden.load(golden), d.pair.fit)
            found[mine.site.path, mine.site.slot] = put
    if found:
        return found
    module = golden_module(paths[0])
    if module is None:
        raise CannotReplay(
            "golden's weights were not recorded and its model is gone: record golden with "
            "weights=True"
        )
    prints = runs.golden.fingerprints.get(paths[0], {}), runs.mine.fingerprints.get(paths[1], {})
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers("", False)):
        if name in prints[1] and prints[0].get(name) != prints[1][name]:
            found[paths[1], name] = in_place(tensor.detach(), None)
    if not found:
        raise CannotReplay("golden's model has no weight of these names that differs")
    return found
