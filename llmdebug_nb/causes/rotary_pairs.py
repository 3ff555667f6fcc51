"""Which channels of a head a rotary embedding turns together, and the weights that don't follow it.

A rotary embedding turns two channels of a head by one angle. Half-split ones turn channel i with
i + half, interleaved ones 2i with 2i + 1: a port of another layout needs the rows of its query and
key weights in another order. Which channels turn together is seen in values: the sum of their
squares stays. Where only modules were recorded, a table of angles tells: such channels have equal
columns in it. A weight whose rows have another order than its program's channels is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from llmdebug_nb.causes.weight_order import in_any_layer, row_order
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon, is_floating
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.paths import is_operator, parent_of, within
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs, Side


class Turning:
    """The weights of one comparison whose rows don't follow the rotary embeddings."""

    def __init__(self, flows: tuple[Flow, Flow], runs: Runs) -> None:
        self._flows, self._sides = flows, (runs.golden, runs.mine)
        self._found: dict[tuple[int, str], torch.Tensor | None] = {}
        self._tables: dict[int, torch.Tensor | None] = {}

    def wrong(self, region: Region) -> Difference | None:
        """Return the row of a weight whose rows have another order than mine turns them in.

        It is one of the module in which the region lies, or of any if the region makes the table of
        angles.
        """
        paths = [r.site.path for r in (region.row.pair.golden,) if r is not None]
        paths += [call.key.path for call in region.golden]
        scopes = list(dict.fromkeys(map(parent_of, self._flows[0].matrices)))
        inside = [scope for scope in scopes if any(within(path, scope) for path in paths)]
        inside = [scope for scope in inside if scope not in map(parent_of, scopes)]
        record = region.row.pair.mine
        is_table = record is not None and self._table_of(1, record) is not None
        rows = (row for scope in (scopes if is_table else inside) for row in self._wrong_in(scope))
        return next(rows, None)

    def _wrong_in(self, scope: str) -> list[Difference]:
        """Return the rows of the weights of golden's module that don't follow.

        A table tells of no weight which one makes what is turned: then all or none must follow.
        """
        weights = self._flows[0].matrices.items()
        rows = [
            d
            for path, weight in weights
            if parent_of(path) == scope
            for d in self._flows[0].rows[weight.id]
            if d.pair.mine is not None
        ]
        told = [(row, *self._follows(row)) for row in rows]
        any_follows = any(follows for _, follows, _ in told)
        return [
            row
            for row, follows, measured in told
            if follows is False and (measured or not any_follows)
        ]

    def _follows(self, row: Difference) -> tuple[bool | None, bool]:
        """Tell whether a weight's rows have the order in which mine turns channels, None if open.

        And whether it was measured in mine that what the weight makes is turned.
        """
        golden, mine = row.pair.golden, row.pair.mine
        assert golden is not None
        assert mine is not None
        measured = self._known(1, mine)
        order = row_order(row)
        pairs = self._known(0, golden), measured
        if pairs[0] is None:
            pairs = self._table(0), pairs[1]
        if measured is None and self._takes_table(mine):
            pairs = pairs[0], self._table(1)
        if order is None or pairs[0] is None or pairs[1] is None or len(pairs[0]) != len(pairs[1]):
            return None, False
        if len(order) % len(pairs[1]):
            return None, False
        return follow(order, pairs[0], pairs[1]), measured is not None

    def _known(self, side: int, weight: Record) -> torch.Tensor | None:
        """Return which channels turn together of what a weight makes, in any layer."""
        key = side, in_any_layer(weight.site.path)
        if key not in self._found:
            self._found[key] = self._measured(side, weight)
        return self._found[key]

    def _table(self, side: int) -> torch.Tensor | None:
        """Return it by the first table of angles, if no operators tell more."""
        if side not in self._tables:
            flow = self._flows[side]
            made = (r for r in flow.records.values() if r.site.role == "output")
            every = any(is_operator(call.path) for call in flow.calls)
            tables = (t for r in made if (t := self._table_of(side, r)) is not None)
            self._tables[side] = None if every else next(tables, None)
        return self._tables[side]

    def _table_of(self, side: int, record: Record) -> torch.Tensor | None:
        """Return the partner of each column of a table of angles: the one that equals it."""
        s = record.summary
        few = len(s.shape) > 1 and s.numel <= constants.READ_ELEMENTS // 64
        if not few or s.shape[-1] < constants.FEWEST_ELEMENTS or not is_floating(s.dtype):
            return None
        value = _load(self._sides[side], record)
        return None if value is None else equal_columns(value)

    def _takes_table(self, weight: Record) -> bool:
        """Tell whether the module around a weight of mine is given a table."""
        scope = parent_of(weight.site.path)
        calls = (call for key, call in self._flows[1].calls.items() if key.path == scope)
        call = next(calls, None)
        return call is not None and any(self._table_of(1, r) is not None for r in call.inputs)

    def _measured(self, side: int, weight: Record) -> torch.Tensor | None:
        """Return it from the first tensor that is a weight's output, turned."""
        flow = self._flows[side]
        made = next((r for r in flow.records.values() if _is_output(r, weight)), None)
        before = None if made is None else _load(self._sides[side], made)
        if made is None or before is None:
            return None
        scope = parent_of(weight.site.path)
        near = (
            r
            for r in flow.records.values()
            if r.id > made.id and within(r.site.path, scope)
            and r.summary.numel % made.summary.numel == 0
            and is_floating(r.summary.dtype) and r.site.key[:3] == made.site.key[:3]
        )  # fmt: skip
        for record in itertools.islice(near, constants.REGION_CALLS):
            after = _load(self._sides[side], record)
            found = None if after is None else turned(before, after, epsilon(made.summary.dtype))
            if found is not None:
                return found
        return None


def equal_columns(table: torch.Tensor) -> torch.Tensor | None:
    """Return the partner of each column [..., columns], int64.

    None if not each column is equal to one other column.
    """
    columns = table.flatten(0, -2).T
    if columns.shape[1] < 2 or not len(columns):
        return None
    _, groups, counts = torch.unique(columns, dim=0, return_inverse=True, return_counts=True)
    if len(counts) < 2 or not bool((counts == 2).all()):
        return None
    pairs = groups.argsort(stable=True).view(-1, 2)
    partners = torch.empty_like(groups)
    partners[pairs] = pairs.flip(1)
    return partners


def turned(before: torch.Tensor, after: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Return the partner of each channel of a head, int64[channels], if heads were turned.

    ``before``: [..., tokens, heads * channels]; ``after``: the same with axes of tokens, heads
    and channels in any order, each head perhaps repeated. A channel whose partner can't be told
    has -1; one that is not turned is its own. None if it is no rotation.
    """
    rows = before.double().flatten(0, -2)
    for heads in _as_heads(after, *rows.shape):
        split = rows.reshape(-1, heads.shape[-1])
        given = heads.flatten(0, 1)
        sizes = split.norm(dim=-1)
        limit = constants.OPERATORS_EPSILONS * eps
        if bool(((given.norm(dim=-1) - sizes).abs() > limit * sizes).any()):
            continue
        partners = _partners(given.square() - split.square(), limit * sizes[:, None] ** 2)
        if partners is not None:
            return partners
    return None


def _as_heads(after: torch.Tensor, tokens: int, width: int) -> Iterator[torch.Tensor]:
    """Yield a tensor as [tokens, heads, channels], float64, in all ways that its shape allows."""
    long = after.double().squeeze()
    for axes in itertools.permutations(range(3)) if long.dim() == 3 and long.numel() else ():
        heads = long.permute(axes)
        channels, own = heads.shape[2], width // max(heads.shape[2], 1)
        if heads.shape[0] != tokens or own < 2 or own * channels != width or len(heads[0]) % own:
            continue
        yield heads[:, :: len(heads[0]) // own]
        if len(heads[0]) > own:
            yield heads[:, :own]


def _partners(change: torch.Tensor, limit: torch.Tensor) -> torch.Tensor | None:
    """Return the partner of each channel: what one gains in squares [n, channels], it loses."""
    size, noise = change.norm(dim=0), limit.norm()
    moves = size > noise
    apart = (change[:, :, None] + change[:, None, :]).norm(dim=0)
    apart.fill_diagonal_(torch.inf)
    least, partners = apart.min(dim=0)
    sure = moves & (least <= noise + constants.SAME_VALUES * size)
    if not bool(sure.any()) or not bool(sure[moves].all()):
        return None
    channels = torch.arange(len(size))
    if not bool((partners[partners] == channels)[sure].all()):
        return None
    return torch.where(sure, partners, -1)


def follow(order: torch.Tensor, golden: torch.Tensor, mine: torch.Tensor) -> bool:
    """Tell whether rows in an order are turned by mine as golden turns them.

    ``order``: which of golden's rows each row of mine is; ``golden``, ``mine``: the partner of
    each channel of a head. All int64. Channels without a known partner tell nothing.
    """
    channels = len(mine)
    head, channel = torch.arange(len(order)) // channels, torch.arange(len(order)) % channels
    partner = mine[channel]
    wanted = golden[order % channels]
    known = (partner >= 0) & (wanted >= 0)
    other = order[(head * channels + partner).clamp(min=0)]
    same_head = other // channels == order // channels
    return bool((same_head & (other % channels == wanted))[known].all())


def _is_output(record: Record, weight: Record) -> bool:
    s = record.site
    return s.role == "output" and s.path == weight.site.path and is_floating(record.summary.dtype)


def _load(side: Side, record: Record) -> torch.Tensor | None:
    if record.summary.numel > constants.READ_ELEMENTS:
        return None
    try:
        return side.load(record)
    except (CannotReplay, CorruptDumpError):
        return None
