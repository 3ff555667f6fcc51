"""The lines of the two programs: those that are to blame, and the others of that module."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from llmdebug_nb.causes import causes
from llmdebug_nb.causes.judge import Blamed
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import common_ancestor, is_operator, module_of
from llmdebug_nb.core.places import line_at
from llmdebug_nb.core.records import CallKey, Frame, Record, forward_in
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall, same_bytes
from llmdebug_nb.replay.runs import Runs, Side
from llmdebug_nb.source.lines import LinePair, LineState, Source
from llmdebug_nb.source.missing_call_line import gap

_FRAME = re.compile(r"(.*):(\d+) (.*)", re.DOTALL)


def of_call(side: Side, key: CallKey, op: str, node: CallKey | None = None) -> Source:
    """Return the source of a call: an operator's line, or where a module's forward begins.

    A dump of another tool knows no forward, but may know the line that calls the module.
    ``node``: the node of an exported graph that makes a module's error; the line is then its own.
    """
    ran = key._replace(phase="forward")  # autograd, which no line calls, runs the backward pass
    operator = ran if is_operator(key.path) else node
    frames = side.run.index.frames(operator) if operator is not None else ()
    if not frames and (module := of_module(side, key.path, op)).frames:
        return module
    return _source(side, key.path, op, frames or side.run.index.frames(ran))


def of_module(side: Side, path: str, op: str = "") -> Source:
    """Return where the forward of a module's class begins."""
    node = next((each for each in side.run.nodes if each.path == module_of(path)), None)
    frames = () if node is None or node.source is None else (node.source,)
    return _source(side, path, op or (node.type if node is not None else ""), frames)


def of_views(side: Side, flow: Flow, record: Record) -> list[Source]:
    """Return the lines of the views on the way to a tensor, the first that ran first.

    Views of what enters the module are code around it, which gives them to others too.
    """
    path, around = module_of(record.site.path), flow.call(record).around
    entering = [r.views for r in (around.inputs if around is not None else [])]
    known = [len(v) for v in entering if record.views[: len(v)] == v]
    frames = side.run.index.frames(record.site.key) if is_operator(record.site.path) else ()
    functions = [(frame.file, frame.function) for frame in frames]
    found = []
    for view in record.views[max(known, default=0) :]:
        match = _FRAME.fullmatch(view.source)
        if match is not None:
            frame = Frame(match[1], int(match[2]), match[3])
            here = frame.file, frame.function
            outside = frames[functions.index(here) + 1 :] if here in functions else ()
            found.append(_source(side, path, view.op, (frame, *outside)))
    return found


def _source(side: Side, path: str, op: str, frames: tuple[Frame, ...]) -> Source:
    if not frames:
        return Source(path, op)
    first = frames[0]
    code = side.run.index.code(first) or line_at(first.file, first.line, side.run.path)
    return Source(path, op, first.file, first.line, code, frames)


def _shared(frames: tuple[Frame, ...], others: tuple[Frame, ...]) -> int:
    """Return the first frame of a stack that is a function of the other stack too."""
    for at, frame in enumerate(frames):
        for there, other in enumerate(others):
            around = zip(frames[at + 1 :], others[there + 1 :], strict=False)  # both may be cut
            if frame[::2] == other[::2] and all(a == b for a, b in around):
                return at
    return 0


class Places:
    """Where a finding is in both programs, line by line.

    ``flows``: the tensors of golden and of mine. ``node``: see `of_call`.
    """

    def __init__(
        self, runs: Runs, flows: tuple[Flow, Flow], blamed: Blamed, node: CallKey | None = None
    ) -> None:
        self._sides, self._flows = (runs.golden, runs.mine), flows
        self._blamed, self._node = blamed, node

    def sources(self) -> tuple[Source | None, Source | None]:
        """Return the lines to blame: golden's and mine's; None on a side that lacks the call."""
        call = self._blamed.call
        found: list[Source | None] = []
        for side, key, op in zip(self._sides, (call.golden, call.mine), call.ops, strict=True):
            found.append(None if key is None else of_call(side, key, op or "", self._node))
        kinds = [key and is_operator(key.path) for key in (call.golden, call.mine)]
        for at, key in enumerate((call.golden, call.mine)):
            if key is not None and not kinds[at] and kinds[at] != kinds[1 - at]:
                found[at] = self._calling(at, key) or found[at]  # the other program has no such one
        if self._blamed.places is not None:
            places = zip(self._sides, self._blamed.places, strict=True)
            found = [of_module(side, path) for side, path in places]
        gives = [*self._again(), *self._views(), *self._giver()]
        if gives and found[1] is not None:
            found[1] = gives[0]
        for at in (0, 1):
            stands = self._stands(at) if found[at] is None else []
            stands = stands or (self._holder(at) if found[at] is None else [])
            found[at] = replace(stands[0], op="", lacks=True) if stands else found[at]
        return self._exact(0, found[0]), self._exact(1, found[1])

    def _exact(self, at: int, source: Source | None) -> Source | None:
        """Return the first line to blame in a module's forward in place of where that begins."""
        side = self._sides[at]
        if source is None or source.lacks or source.frames != of_module(side, source.path).frames:
            return source
        guilty = [(p.golden, p.mine)[at] for p in self.pairs() if p.state == "guilty"]
        module = module_of(source.path)
        for each in (g for g in guilty if g is not None and module_of(g.path) == module):
            inside = forward_in(each.frames, next(iter(source.frames), None))
            if inside is not None:
                return _source(side, source.path, source.op, each.frames[inside:])
        return source

    def _calling(self, at: int, key: CallKey) -> Source | None:
        """Return the line that calls a module, by the stack of an operator inside it."""
        call, side = self._flows[at].calls.get(key), self._sides[at]
        first = None if call is None else next(call.operators, None)
        if call is None or first is None:
            return None
        frames = self._outside(at, side.run.index.frames(first.key, whole=True), key.path)
        return _source(side, key.path, call.records_of[0].op, frames) if frames else None

    def _outside(self, at: int, frames: tuple[Frame, ...], path: str) -> tuple[Frame, ...]:
        """Return the frames around a module's forward, all if it is not among them."""
        begins = next(iter(of_module(self._sides[at], path).frames), None)
        inside = forward_in(frames, begins)
        return frames[0 if inside is None else inside + 1 :]

    def pairs(self) -> tuple[LinePair, ...]:
        """Return the lines of the region, and those of mine's module around it."""
        region = self._blamed.region
        if region is None:
            return ()
        alone = int(self._blamed.call.one_sided)
        sides = [
            [self._of(at, call) for call in calls if call.is_operator]
            or [s for call in calls[:alone] if (s := self._calling(at, call.key)) is not None]
            for at, calls in enumerate((region.golden, region.mine))
        ]
        views, giver = self._views(), self._giver()
        lacking = self._stands(1) if self._blamed.call.mine is None else []
        if lacking or giver:  # what stands before the place is right
            sides[1] = lacking[1:] or lacking or [*giver, *views]
        elif views:
            sides[1] += [*views, *self._takers()]
        count = max(map(len, sides))
        padded = [[*side, *[None] * (count - len(side))] for side in sides]
        guilty = [LinePair(g, m, None, "guilty") for g, m in zip(*padded, strict=True)]
        return (*guilty, *self._around([call.key for call in region.mine]))

    def _again(self) -> list[Source]:
        """Return the line that computes once more what mine has already, if that is taken.

        What is taken should have been something else: that call was given the wrong tensor.
        """
        region, flow = self._blamed.region, self._flows[1]
        maker = flow.maker(region.taken[1]) if region is not None and region.taken else None
        if maker is None or causes.about(self._blamed.cause).of_weights:
            return []
        made = maker.outputs[0]
        before = (r for r in flow.records.values() if r.id < maker.start and same_bytes(r, made))
        first = next((r for r in before if r.site.role == "output"), None)
        return [self._of(1, maker)] if first is not None and first.op == made.op else []

    def _views(self) -> list[Source]:
        """Return the lines of views that lead to the wrong tensor."""
        region = self._blamed.region
        if region is None or causes.about(self._blamed.cause).of_weights:
            return []
        if region.taken is not None:
            return of_views(self._sides[1], self._flows[1], region.taken[1])
        record = region.row.pair.mine
        acts = [call for call in region.mine if call.is_operator]
        if record is None or acts:
            return []
        return of_views(self._sides[1], self._flows[1], record)

    def _giver(self) -> list[Source]:
        """Return the line that gives mine's call the wrong tensor.

        It is in the innermost function that has both: the call, or a helper's or a module's call
        that makes it, and the tensor, which is made there or comes in as an input.
        """
        side, flow, region = self._sides[1], self._flows[1], self._blamed.region
        given = None if region is None or region.mine else region.row.pair.mine
        if region is not None and region.taken is not None:
            given = region.taken[1]
        taker = next(iter(region.mine), None) if region is not None else None
        before = None if region is None else region.before
        if given is not None and taker is None and given.site.role == "input":
            taker, before = flow.taker(given), before or flow.call(given)
        if given is None or taker is None or causes.about(self._blamed.cause).of_weights:
            return []
        stack = side.run.index.frames
        frames, maker = stack(taker.key, whole=True), flow.maker(given)
        around = (before or taker).around
        if before is not None and not before.is_operator:
            frames = self._outside(1, frames, before.key.path)
        views = of_views(side, flow, given)
        here = [at for at, f in enumerate(frames) if views and f[::2] == views[-1].frames[0][::2]]
        if here:
            frames = frames[here[0] :]
        elif maker is None and region is not None and region.taken is not None:
            frames = frames[self._shared_by_others(taker) :]
        elif maker is not None and not (around is not None and flow.takes(around, given)):
            frames = frames[_shared(frames, stack(maker.key, whole=True)) :]
        if self._blamed.places is not None:
            own = of_module(side, self._blamed.places[1])
            return [_source(side, own.path, own.op, frames)]
        return [_source(side, taker.key.path, taker.records_of[0].op, frames)]

    def _shared_by_others(self, call: FlowCall) -> int:
        """Return how many of its innermost lines a call shares with one of its kind that agrees.

        These are the lines of a helper, which works on what it is given.
        """
        flow, frames = self._flows[1], self._sides[1].run.index.frames
        own, op, shared = frames(call.key), call.records_of[0].op, 0
        for other in flow.calls.values():
            if other is call or other.records_of[0].op != op or not other.outputs:
                continue
            if all(map(flow.agrees, other.outputs)):
                pairs = zip(own[:-1], frames(other.key), strict=False)
                same = itertools.takewhile(lambda both: both[0] == both[1], pairs)
                shared = max(shared, len(list(same)))
        return shared

    def _takers(self) -> list[Source]:
        """Return the line that takes the wrong tensor, if no call of mine is in the region."""
        region = self._blamed.region
        record = None if region is None or region.mine else region.row.pair.mine
        call = None if record is None else self._flows[1].call(record)
        return [] if call is None or not call.is_operator else [self._of(1, call)]

    def _stands(self, at: int) -> list[Source]:
        """Return the lines between which a call would stand that one program leaves out.

        They are in the innermost function that runs both.
        """
        region, side = self._blamed.region, self._sides[at]
        if region is None:
            return []
        calls = [call for call in gap(region, self._flows, at) if call is not None]
        path = common_ancestor([module_of(call.key.path) for call in calls])
        stacks = [side.run.index.frames(call.key, whole=True) for call in calls]
        within = [
            own[_shared(own, other) :] for own, other in zip(stacks, stacks[::-1], strict=True)
        ]
        return [_source(side, path, "", frames) for frames in within if frames]

    def _holder(self, at: int) -> list[Source]:
        """Return where the module begins that answers to the one around a call it lacks."""
        key = self._blamed.call.key
        call = self._flows[1 - at].calls.get(key)
        around = None if call is None or call.is_operator else call.around
        rows = self._flows[1 - at].rows
        partners = [d.pair.own(at) for r in around.outputs for d in rows[r.id]] if around else []
        path = next((r.site.path for r in partners if r is not None), None)
        source = None if path is None else of_module(self._sides[at], path)
        return [source] if source is not None and source.frames else []

    def _of(self, at: int, call: FlowCall) -> Source:
        return of_call(self._sides[at], call.key, call.records_of[0].op)

    def _around(self, guilty: list[CallKey]) -> Iterator[LinePair]:
        """Yield the other operators of mine's module, each with golden's partner and its state."""
        key = self._blamed.call.mine
        if key is None:
            return
        module, flow = module_of(key.path), self._flows[1]
        calls = [
            call
            for call in flow.calls.values()
            if call.is_operator
            and module_of(call.key.path) == module
            and call.outputs
            and call.key[:3] == key[:3]
            and call.key not in guilty
        ]
        for call in sorted(calls, key=lambda call: call.start)[: constants.LINES_SHOWN]:
            rows = [d for r in call.outputs for d in flow.rows[r.id] if d.pair.golden is not None]
            agrees = flow.agrees(call.outputs[0])
            partner = rows[0].pair.golden if rows else None
            state: LineState = "equal" if agrees else "inherited" if rows else "rewritten"
            error = max((d.error or 0.0 for d in rows), default=None)
            golden = (
                None
                if partner is None or not is_operator(partner.site.path)
                else of_call(self._sides[0], partner.site.key, partner.op)
            )
            yield LinePair(golden, self._of(1, call), error, state)
