"""Choices that rounding decides: two experts, or tokens, that score about the same.

Both programs may choose rightly and go on with other experts. Then what follows differs, and no
call has made an error. What follows is another value of the tokens that chose otherwise, and of
those behind them, which attend to them. So an error of another token has another cause, and so has
one that is far larger than what enters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import AGREES, Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs


class Tie(NamedTuple):
    """A choice that rounding decides, in words. ``tokens``: how many the step has."""

    words: str
    tokens: int


class Tokens(NamedTuple):
    """The errors of a tensor by token: ``at``, int64[n], which; the norms of golden's values."""

    at: torch.Tensor
    error: torch.Tensor
    size: torch.Tensor

    @property
    def relative(self) -> torch.Tensor:
        """The error of each over its norm, or over the usual one if that is more, float32[n]."""
        usual = self.size.square().mean().sqrt()
        return (self.error / torch.maximum(self.size, usual)).nan_to_num(0.0)

    def agree(self, but: torch.Tensor, limit: float) -> bool:
        """Tell whether all tokens agree ``but`` some, bool[n]: each of them, and as a whole."""
        rest, most = ~but, limit * constants.WORST_ROW
        if bool((self.error[rest] > most * self.size[rest]).any()):
            return False
        return bool(self.error[rest].norm() <= limit * self.size[rest].norm())


def told(region: Region, runs: Runs, flow: Flow) -> Tie | None:
    """Return the choice in a region that rounding decides; None if there is none.

    The scores agree within noise, golden chooses the best of them, and the best of mine's scores
    are others. The tokens for which both choose the same have to agree. ``flow``: golden's.
    """
    for scores, chosen in _choices(region, flow):
        if scores.verdict not in AGREES:
            continue
        try:
            golden, mine = (x.reshape(-1, x.shape[-1]) for x in _fitted(scores, runs))
            index = runs.golden.load(chosen).reshape(-1, chosen.summary.shape[-1])
            tokens = _by_token(region.row, runs, len(index), strict=False)
        except (CannotReplay, ValueError, RuntimeError):
            continue
        names_places = bool(((index >= 0) & (index < golden.shape[-1])).all())
        if tokens is None or len(golden) != len(index) or not names_places:
            continue
        made, best, other = (
            torch.zeros_like(golden, dtype=torch.bool).scatter_(-1, places.long(), True)
            for places in (index, *(x.topk(index.shape[-1]).indices for x in (golden, mine)))
        )
        changed = (best != other).any(-1)
        limit = region.row.limit or 0.0
        if torch.equal(made, best) and bool(changed.any()) and tokens.agree(changed, limit):
            row = int(changed.nonzero()[0])
            by, against = (float(golden[row][side[row]].min()) for side in (best, other))
            count, of = index.shape[-1], golden.shape[-1]
            words = f"rounding decides a choice in {chosen.site.path or 'the model'} for "
            words += f"{int(changed.sum())} of {len(index)} tokens: "
            words += f"golden chooses {count} of {of}, by {by:.4g} against {against:.4g}"
            return Tie(words, len(index))
    return None


class Behind:
    """Tells of the regions behind near ties whether they only pass on what another choice made.

    ``tokens``: how many a step has in which there is one, by its generation and number. ``flow``:
    golden's.
    """

    def __init__(self, tokens: Mapping[tuple[int, int], int], runs: Runs, flow: Flow) -> None:
        self._tokens, self._runs, self._flow = tokens, runs, flow

    def __call__(self, region: Region) -> bool:
        """Tell whether each token is off by what enters for it, or for one before it.

        So it is taken to be where nothing tells the tokens apart.
        """
        site = region.row.site
        tokens = self._tokens.get((site.generation, site.step), 0)
        if not tokens:
            return False
        try:
            own = _by_token(region.row, self._runs, tokens)
            if own is None:
                return True
            entering = torch.zeros(tokens)
            for row in (*region.entries, *region.expected):
                given = _by_token(row, self._runs, tokens)
                if given is not None:
                    entering[given.at] = torch.maximum(entering[given.at], given.relative)
            before = entering.cummax(0).values[own.at]
            passed = own.relative <= constants.AMPLIFICATION * before
            passed |= self._changed(region, tokens)[own.at]
            return own.agree(passed, region.row.limit or 0.0)
        except (CannotReplay, ValueError, RuntimeError):
            return True

    def _changed(self, region: Region, tokens: int) -> torch.Tensor:
        """Return which tokens another choice is made for in a region, bool[tokens]."""
        found = torch.zeros(tokens, dtype=torch.bool)
        for scores, chosen in _choices(region, self._flow):
            golden, mine = (x.reshape(-1, x.shape[-1]) for x in _fitted(scores, self._runs))
            if len(golden) == tokens:
                best, other = (
                    x.topk(chosen.summary.shape[-1]).indices.sort().values for x in (golden, mine)
                )
                found |= (best != other).any(-1)
        return found


def _choices(region: Region, flow: Flow) -> Iterator[tuple[Difference, Record]]:
    """Yield rows of scores that both runs have, and golden's choice of as many tokens."""
    made = [record for call in _makers(region, flow) for record in call.outputs]
    scored = [row for r in made for row in flow.rows[r.id] if row.verdict != "unmatched"]
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


def _by_token(row: Difference, runs: Runs, tokens: int, strict: bool = True) -> Tokens | None:
    """Return the errors of a row by token; None if its tensors do not tell.

    ``strict``: its first axis that is not 1 has to be that of the tokens, as it is of what code
    adds up; else the tokens of a tensor with as many parts may lie in any order.
    """
    if row.pair.golden is None or row.pair.mine is None or row.limit is None:
        return None
    golden, mine = _fitted(row, runs)
    at = torch.arange(tokens)
    if not strict or _first(golden.shape) == tokens:
        if golden.numel() % tokens:
            return None
    else:
        shape, fit = row.pair.mine.summary.shape, row.pair.fit
        places = fit.places(1, shape) if fit is not None and _first(shape) == tokens else None
        if places is None:
            return None
        at = torch.unique(places // (row.pair.mine.summary.numel // tokens))
    golden, mine = golden.reshape(len(at), -1), mine.reshape(len(at), -1)
    return Tokens(at, (mine - golden).norm(dim=-1), golden.norm(dim=-1))


def _first(shape: tuple[int, ...]) -> int:
    """Return the length of the first axis that is not 1."""
    return next((length for length in shape if length != 1), 1)
