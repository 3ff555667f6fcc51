"""Choices that rounding decides: two experts, or tokens, that score about the same.

Both programs may choose rightly and go on with other experts. Then what follows differs, and no
call has made an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.flow import AGREES, Flow
from llmdebug_nb.explain.flow_calls import FlowCall
from llmdebug_nb.explain.frontier import Region
from llmdebug_nb.explain.operators import CannotReplay
from llmdebug_nb.explain.runs import Runs


def told(region: Region, runs: Runs, flow: Flow) -> str:
    """Return the choice in a region that rounding decides, in words; "" if there is none.

    The scores agree within noise, golden chooses the best of them, and the best of mine's scores
    are others. The tokens for which both choose the same have to agree. ``flow``: golden's.
    """
    for scores, chosen in _choices(region, flow):
        try:
            golden, mine = (x.reshape(-1, x.shape[-1]) for x in _fitted(scores, runs))
            index = runs.golden.load(chosen).reshape(-1, chosen.summary.shape[-1])
            apart = _tokens_apart(region.row, runs, len(index))
        except (CannotReplay, ValueError, RuntimeError):
            continue
        names_places = bool(((index >= 0) & (index < golden.shape[-1])).all())
        if apart is None or len(golden) != len(index) or not names_places:
            continue
        made, best, other = (
            torch.zeros_like(golden, dtype=torch.bool).scatter_(-1, places.long(), True)
            for places in (index, *(x.topk(index.shape[-1]).indices for x in (golden, mine)))
        )
        changed = (best != other).any(-1)
        if torch.equal(made, best) and bool(changed.any()) and not bool((apart & ~changed).any()):
            row = int(changed.nonzero()[0])
            by, against = (float(golden[row][side[row]].min()) for side in (best, other))
            count, of = index.shape[-1], golden.shape[-1]
            return f"golden chooses {count} of {of}, by {by:.4g} against {against:.4g}"
    return ""


def _choices(region: Region, flow: Flow) -> Iterator[tuple[Difference, Record]]:
    """Yield rows of scores that agree within noise, and golden's choice of as many tokens."""
    made = [record for call in _makers(region, flow) for record in call.outputs]
    scored = [row for record in made for row in flow.rows[record.id] if row.verdict in AGREES]
    for row in (*region.entries, *scored):
        golden = row.pair.golden
        if golden is None or row.pair.mine is None or not is_floating(golden.summary.dtype):
            continue
        *tokens, count = golden.summary.shape or (0,)
        for record in made:
            *others, best = record.summary.shape or (0,)
            if record.summary.dtype in ("int64", "int32") and others == tokens and best < count:
                yield row, record


def _makers(region: Region, flow: Flow) -> list[FlowCall]:
    """Return the calls that make golden's tensor of what agrees.

    A region ends where golden's tensors differ. The choice may lie behind them, as where golden has
    a call for all experts and mine one for each.
    """
    calls = {id(call): call for call in region.golden}
    queue = [record] if (record := region.row.pair.golden) is not None else []
    seen = {record.id for record in queue}
    while queue:
        sources, maker = flow.sources(queue.pop())
        if maker is not None:
            calls[id(maker)] = maker
        behind = [r for r in sources if r.id not in seen and not flow.agrees(r)]
        seen |= {record.id for record in behind}
        queue += behind
    return list(calls.values())


def _fitted(row: Difference, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors of a row in one shape, float32."""
    golden, mine = row.pair.golden, row.pair.mine
    assert golden is not None
    assert mine is not None
    pair = runs.golden.load(golden), runs.mine.load(mine)
    both = pair if row.pair.fit is None else row.pair.fit(*pair)
    return both[0].float(), both[1].float().reshape(both[0].shape)


def _tokens_apart(row: Difference, runs: Runs, tokens: int) -> torch.Tensor | None:
    """Return bool[tokens]: which tokens differ more than one token may; None if unknown."""
    if row.pair.golden is None or row.pair.mine is None or row.limit is None:
        return None
    golden, mine = _fitted(row, runs)
    if golden.numel() % tokens:
        return None
    golden, mine = golden.reshape(tokens, -1), mine.reshape(tokens, -1)
    most = row.limit * constants.WORST_ROW
    apart: torch.Tensor = (mine - golden).norm(dim=-1) > most * golden.norm(dim=-1)
    return apart
