"""Aligning sequences of calls, with known insertions, removals and replacements."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from llmdebug_nb.align import pairing
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.align.sequence import CallFeatures, agreement, align, digits
from llmdebug_nb.core.records import Record, Site, Summary

OPS = ("linear", "matmul", "add", "mul", "softmax", "silu")


def _value(seed, exact=True):
    """Return a tensor's summary; not ``exact``: equal up to rounding, with other bytes."""
    draw = random.Random(seed)
    ranges = ((-3, -1), (1, 3), (-0.5, 0.5), (20, 40))
    figures = [draw.uniform(*each) for each in ranges]
    noise = 0.0 if exact else 1e-6
    low, high, mean, norm = (
        x * (1 + noise * random.Random(seed + i).random()) for i, x in enumerate(figures)
    )
    return Summary(
        "float32",
        (2, 8, 32),
        low,
        high,
        mean,
        norm,
        0,
        0,
        0,
        f"xxh3:{seed:016x}" if exact else f"xxh3:n{seed:015x}",
    )


def _token(op, seed, exact=True):
    return CallFeatures(op, ("output", (2, 8, 32)), value=_value(seed, exact))


@st.composite
def _edited(draw):
    """Return two sequences of (op, value) and the places that are truly the same call."""
    golden = [(draw(st.sampled_from(OPS)), i) for i in range(draw(st.integers(0, 25)))]
    mine, truth, fresh = [], [], 1000
    for i, call in enumerate(golden):
        what = draw(st.sampled_from(["keep"] * 6 + ["insert", "drop", "replace"]))
        if what in ("insert", "replace"):
            mine += [
                (draw(st.sampled_from(OPS)), fresh + n) for n in range(draw(st.integers(1, 3)))
            ]
            fresh += 10
        if what in ("insert", "keep"):
            truth.append((i, len(mine)))
            mine.append(call)
    return golden, mine, truth


@settings(deadline=None)
@given(_edited(), st.booleans())
def test_calls_that_are_the_same_find_each_other_whatever_was_inserted_removed_or_replaced(
    edited, exact
):
    golden, mine, truth = edited
    found = align([_token(op, n) for op, n in golden], [_token(op, n, exact) for op, n in mine])
    assert set(truth) <= set(found)
    assert all(
        golden[i][0] == mine[j][0] for i, j in found
    )  # what else is paired is at least the same operator


@settings(deadline=None)
@given(_edited(), st.booleans())
def test_an_alignment_rises_on_both_sides(edited, exact):
    golden, mine, _ = edited
    found = align([_token(op, n) for op, n in golden], [_token(op, n, exact) for op, n in mine])
    for side in zip(*found, strict=True):
        assert all(a < b for a, b in itertools.pairwise(side))


@given(st.lists(st.sampled_from(OPS), max_size=40))
def test_a_sequence_is_aligned_with_itself_whatever_its_values(ops):
    golden = [_token(op, i) for i, op in enumerate(ops)]
    other = [_token(op, 500 + i) for i, op in enumerate(ops)]
    places = [(i, i) for i in range(len(ops))]
    assert align(golden, golden) == places
    assert align(golden, other) == places  # a bug in front changed all of them


def test_an_inserted_call_of_the_same_operator_shifts_nothing_after_a_bug():
    ops = ("linear", "silu", "mul", "linear")
    golden = list(map(_token, ops, (1, 2, 3, 4)))
    mine = [_token("norm", 99), *map(_token, ops, (11, 12, 13, 14))]
    assert align(golden, mine) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_another_operator_with_the_same_result_takes_the_place_of_three():
    ops = ("linear", "matmul", "softmax", "matmul", "linear")
    golden = list(map(_token, ops, (1, 2, 3, 4, 5)))
    mine = [_token("linear", 1), _token("sdpa", 4, exact=False), _token("linear", 5)]
    assert align(golden, mine) == [(0, 0), (3, 1), (4, 2)]


def test_long_sequences_take_the_same_way_as_short_ones():
    draw = random.Random(3)
    golden = [(draw.choice(OPS), i) for i in range(1500)]
    mine = [call for call in golden if draw.random() > 0.1]
    for _ in range(150):
        mine.insert(draw.randrange(len(mine)), (draw.choice(OPS), 5000 + draw.randrange(10**6)))
    places = {call: j for j, call in enumerate(mine)}
    truth = {(i, places[call]) for i, call in enumerate(golden) if call in places}
    assert truth <= set(
        align([_token(op, n) for op, n in golden], [_token(op, n) for op, n in mine])
    )


def test_digits_of_agreement_count_the_worst_of_the_statistics():
    base = Summary("float32", (100,), -2.0, 2.0, 0.1, 10.0)
    near = Summary("float32", (100,), -2.0, 2.0, 0.1, 10.01)  # 1e-3 of the norm
    assert agreement(base, base) == 6.0
    assert round(agreement(base, near), 6) == 3.0
    assert agreement(base, Summary("float32", (50,), -2.0, 2.0, 0.1, 10.0)) == 0.0
    assert (
        agreement(Summary("float32", (100,), 1.0, 1.0, 1.0, 10.0), base) == 0.0
    )  # a constant tells nothing


# --- whole runs --------------------------------------------------------------------------------


def _records(calls, prefix=""):
    """Return an input and an output record of each (path, op, value), numbered per path."""
    numbers, records = {}, []
    for path, op, seed in calls:
        full = f"{prefix}{path}/{op}" if op else f"{prefix}{path}"
        call = numbers[full] = numbers.get(full, -1) + 1
        for role, value in (("input", seed + 100_000), ("output", seed)):
            site = Site(full, call=call, role=role)
            records.append(Record(len(records), site, len(records), op or "Module", _value(value)))
    return records


MODULES = ("a", "a.b", "a.b.c", "d")


@st.composite
def _run_pair(draw):
    golden, mine, _ = draw(_edited())
    homes = {}
    for _, n in (*golden, *mine):
        homes.setdefault(n, draw(st.sampled_from(MODULES)))
    return [[(homes[n], op, n) for op, n in side] for side in (golden, mine)]


@settings(deadline=None)
@given(_run_pair())
def test_every_record_appears_exactly_once_and_the_order_is_goldens(sides):
    golden, mine = (_records(side) for side in sides)
    pairs = pairing.pair(golden, mine)
    assert [p.golden.id for p in pairs if p.golden] == [r.id for r in golden]
    assert sorted(p.mine.id for p in pairs if p.mine) == [r.id for r in mine]
    assert all(p.why for p in pairs)


@settings(deadline=None)
@given(_run_pair())
def test_operators_of_equal_values_pair_whatever_their_call_numbers(sides):
    golden, mine = (_records(side) for side in sides)
    partner = {p.golden.id: p.mine.id for p in pairing.pair(golden, mine) if p.golden and p.mine}
    there = {(r.site.path, r.site.role, r.summary.fingerprint): r.id for r in mine}
    for record in golden:
        key = record.site.path, record.site.role, record.summary.fingerprint
        if key in there:
            assert partner[record.id] == there[key]


@settings(deadline=None)
@given(_run_pair())
def test_a_run_pairs_with_itself_completely(sides):
    records = _records(sides[0])
    pairs = pairing.pair(records, records)
    assert [(p.golden.id, p.mine.id, p.why) for p in pairs] == [
        (r.id, r.id, Reason.SAME_SITE.text) for r in records
    ]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=3, max_size=12, unique=True),
    st.permutations(list("abcdefghijkl")),
)
def test_renaming_every_module_pairs_completely(values, letters):
    golden = _records([(f"layers.{i}", "", n) for i, n in enumerate(values)])
    mine = _records([(f"blocks.{letters[i]}", "", n) for i, n in enumerate(values)])
    pairs = pairing.pair(golden, mine)
    assert [(p.golden.id, p.mine.id) for p in pairs] == [(r.id, r.id) for r in golden]
    assert all(p.why.startswith("renamed module") for p in pairs)


FIGURES = st.sampled_from((0.0, 1.0, -1.0, 1e-9, 3.5, 1e30, float("inf"), float("nan"), None))


@st.composite
def _summaries(draw):
    """Return two summaries, whose figures may be absent, far apart, equal or nearly so."""
    shape = (draw(st.sampled_from((3, 4, 1000))),)
    own = [draw(FIGURES) for _ in range(4)]
    share = draw(st.sampled_from((0.0, 1e-9, 1e-4, 0.03)))
    near = [figure if figure is None else figure * (1 + share) for figure in own]
    other = [draw(st.sampled_from((a, b))) for a, b in zip(near, own[1:] + own[:1], strict=True)]
    return Summary("float32", shape, *own), Summary("float32", shape, *other)


@settings(max_examples=500, deadline=None)
@given(_summaries())
def test_the_agreement_of_two_tensors_is_that_of_a_pair_among_many(pair):
    golden, mine = pair
    others = [_value(seed) for seed in range(3)]
    among = digits([others[0], golden, others[1]], [mine, others[2]])
    assert agreement(golden, mine) == among[1, 0]
