"""A dump of very many calls that no partner is found for, or that never end, costs no more each."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import EXAMPLE, write
from llmdebug_nb.align.calls import same_features, same_kind
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.results import ResultMatches
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.graph.flow import Flow

MANY = 20_000
BUSY = 30.0  # CPU seconds of a busy machine; each takes less than two, and took minutes before


def output(number, path, shape=(2, 3), step=0, role="output", call=0, producer=None):
    site = Site(path, step, call, role=role)
    return Record(number, site, number, "Op", Summary("float32", shape), producer=producer)


# -- results without partners ---------------------------------------------------------------------

SHAPES = st.sampled_from([(), (3,), (2, 3), (4, 3), (2, 5)])
SIDE = st.lists(st.tuples(st.sampled_from("abcd"), SHAPES), max_size=8)
FLOATS = {"dtype": "float32"}


def side(found, step):
    return [output(n, path, shape, step, call=n) for n, (path, shape) in enumerate(found)]


def one_by_one(known, golden, mine, answered):
    """Say the rule again: look at all that is left of mine for each of golden's, the last first."""
    left, free, found = list(golden), list(mine), []
    while left:
        record = left.pop()
        s = record.summary
        slots = [r for r in free if (r.site.path, r.site.slot) == known.get(record.site.path)]
        alike = [r for r in free if same_kind(s, r.summary)]
        rows = [r for r in free if same_features(s, r.summary)]
        if slots:
            partner = slots[0]
        elif answered:
            alone = len(alike) == 1 and not any(same_kind(s, r.summary) for r in left)
            partner = alike[0] if alone else None
        else:
            partner = (alike or rows or [None])[-1]
        if partner is not None:
            free.remove(partner)
            found.append((record.id, partner.id))
    return found


@settings(deadline=None)
@given(SIDE, SIDE, st.lists(st.sampled_from("abcd"), min_size=4, max_size=4), st.booleans())
def test_results_pair_as_if_each_looked_at_all_of_the_others(golden, mine, others, answered):
    matches = ResultMatches()
    earlier = side([(path, (7,)) for path in "abcd"], 0), side([(p, (7,)) for p in others], 0)
    pairs = [Pair(one, other, "") for one, other in zip(*earlier, strict=True)]
    assert list(matches.match(earlier, pairs)) == []
    known = {one.site.path: (other.site.path, "0") for one, other in zip(*earlier, strict=True)}
    both = side(golden, 1), side(mine, 1)
    pairs = []
    if answered:
        more = output(100, "e", (9, 9), 1), output(100, "e", (9, 9), 1)
        both[0].append(more[0]), both[1].append(more[1])
        pairs = [Pair(*more, "")]
    found = [(one.id, other.id) for one, other in matches.match(both, pairs)]
    assert found == one_by_one(known, side(golden, 1), side(mine, 1), answered)


@pytest.mark.parametrize("paired", [False, True])
def test_very_many_results_that_no_pair_tells_are_looked_through_in_time(paired):
    golden = [output(n, "a", (n % 7, 3), call=n) for n in range(MANY)]
    mine = [output(n, "b", (n % 7, 4), call=n) for n in range(MANY)]
    pairs = [Pair(golden[n], mine[n], "") for n in range(MANY // 2 if paired else 0)]
    start = time.process_time()
    found = list(ResultMatches().match((golden, mine), pairs))
    assert [(one.id, other.id) for one, other in found] == [
        (MANY - 1 - n, MANY // 2 + n) for n in range(MANY // 2 if paired else 0)
    ]  # they were at these places before
    assert time.process_time() - start < BUSY


# -- calls in calls -------------------------------------------------------------------------------


def rows(records):
    return [Difference(n, Pair(r, None, ""), "unmatched") for n, r in enumerate(records)]


@st.composite
def _calls(draw):
    """Calls of modules that begin and end in any order, as in a dump that lies."""
    made = []
    for n in range(draw(st.integers(1, 24))):
        path = draw(st.sampled_from(["", "a", "a.b", "a.b.c", "d", "a/Op.f"]))
        role = draw(st.sampled_from(["input", "output", "output"]))
        call, producer = draw(st.integers(0, 2)), draw(st.sampled_from([None, 0]))
        made.append(output(n, path, role=role, call=call, producer=producer))
    return made


def calls_around(flow):
    """Say the rule again: at each start all that is over ends, with what began inside it."""
    latest, running, found = {}, [], {}
    linked = any(r.producer is not None for r in flow.records.values())
    for call in sorted(flow.calls.values(), key=lambda call: call.start):
        over = [n for n, each in enumerate(running) if each.end < call.start]
        del running[min(over, default=len(running)) :]
        known = [latest[path] for path in ancestors(call.key.path) if path in latest]
        around = known[0] if known else None
        if around is not None and linked and around.end < call.start:
            around = running[-1] if running else None
        found[call.key] = around
        latest[call.key.path] = call
        if call.outputs and not call.is_operator:
            running.append(call)
    return found


@settings(deadline=None)
@given(_calls())
def test_each_call_has_the_call_around_it_that_a_walk_through_all_finds(records):
    flow = Flow(rows(records), 0)
    assert {key: call.around for key, call in flow.calls.items()} == calls_around(flow)


def test_very_many_calls_that_all_end_after_the_last_began_are_nested_in_time():
    begun = [output(n, "a", role="input", call=n) for n in range(MANY)]
    ended = [output(MANY + n, "a", call=n) for n in range(MANY)]
    start = time.process_time()
    assert len(Flow(rows([*begun, *ended]), 0).calls) == MANY
    assert time.process_time() - start < BUSY


def test_a_dump_of_very_many_calls_of_one_operation_compares(tmp_path):
    """Their tensors lie in one file each: the writer appends."""
    for name in ("before/intensor0.bin", "after/outtensor0.bin"):
        write(tmp_path / "atb_dump_data/data/0_4242/0/0_Linear" / name, EXAMPLE * 400)
    run = ld.open_run(tmp_path)
    report = ld.compare(run, run, progress=False)
    assert report.verdict == "match"
    assert len(report.differences) == 800
