"""Which tokens of a tensor that diverged differ: those whose own error is beyond the limit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from markupsafe import escape

import llmdebug_nb as ld
from llmdebug_nb.align import fit as fits
from llmdebug_nb.align.batch_layout import BatchMap, TokenSpan
from llmdebug_nb.align.fit import Fit
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import metrics, sums
from llmdebug_nb.comparison.differences import Comparison, Difference
from llmdebug_nb.comparison.differing_rows import DifferingRows
from llmdebug_nb.comparison.measured import error_of
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.untouched import Steps
from llmdebug_nb.core import constants, spans
from llmdebug_nb.core.kernels import row_sizes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, RootCall, Site, Summary
from llmdebug_nb.show import html
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.text import difference_text, finding_text
from models import llama, prompt
from recordings import recorded_both
from view_requests import row_request

LIMIT = 1e-3
NAN, INF = math.nan, math.inf


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row(
    golden: torch.Tensor,
    mine: torch.Tensor,
    *,
    tokens: int = 40,
    batch: int = 1,
    total: int | None = None,
    role: str = "output",
    limit: float = LIMIT,
    fit: Fit | None = None,
    rule: Rule = Rule.NOISE,
    stats: str = "",
    kept: tuple[slice, ...] | None = None,
) -> Difference:
    """Return the row of two tensors of a step of so many tokens, beyond the limit.

    ``stats``: its values were not recorded; "sizes": but the sizes of the rows were. ``kept``: the
    part of the values that was.
    """
    site, records = Site("layers.0", role=role), []
    for x in (golden, mine):
        s = summarize(x)
        sizes = row_sizes.of(x) if stats == "sizes" else None
        summary = Summary(s.dtype, s.shape, s.min, s.max, s.mean, s.l2norm, s.nan, s.inf, s.zero,
                          s.fingerprint, sizes)  # fmt: skip
        records.append(
            Record(len(records), site, 0, "Linear", summary, kept=kept and "slice", payload="kept")
        )
    pair = Pair(*records, "same site", fit=fit)
    if stats:
        found, errors = metrics.statistics(*(record.summary for record in records)), None
    else:
        golden, mine = (x if kept is None else x[kept] for x in (golden, mine))
        found, errors = metrics.by_rows(*((golden, mine) if fit is None else fit(golden, mine)))
    calls = [RootCall(0, kind="prefill", query=tokens, total=total or tokens, batch=batch)]
    return Difference(
        0, pair, "diverged", error_of(found), limit, found, rule=rule, rows=errors,
        comparison=Comparison(Steps(calls).of),
    )  # fmt: skip


def says(golden: torch.Tensor, mine: torch.Tensor, **more: object) -> str:
    found = row(golden, mine, **more).differing  # type: ignore[arg-type]
    return found.says if found else ""


def changed(golden: torch.Tensor, *at: object, by: float = 2.0) -> torch.Tensor:
    mine = golden.clone()
    mine[at] *= by
    return mine


# -- by values ------------------------------------------------------------------------------------


def test_a_bug_from_token_12_on_is_told():
    golden = random(1, 40, 16)
    found = row(golden, changed(golden, slice(None), slice(12, None))).differing
    assert found is not None
    assert (found.says, found.where) == ("tokens 12-39 of 40 differ", "tokens 12-39 of 40")
    assert found.share == 28 / 40


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ((40, 16), (slice(12, 20),)),
        ((1, 40, 4, 16), (0, slice(12, 20), 1)),  # of one head alone
        ((1, 4, 40, 16), (0, 3, slice(12, 20))),
        ((4, 40, 16), (2, slice(12, 20))),  # heads of a single row
        ((1, 4, 40, 40), (0, 1, slice(12, 20), 7)),  # scores: the queries
        ((1, 40, 1), (0, slice(12, 20))),
    ],
)
def test_tokens_lie_along_their_axis_whatever_the_others_are(shape, at):
    golden = random(*shape)
    assert says(golden, changed(golden, *at)) == "tokens 12-19 of 40 differ"


@given(
    st.integers(2, 30), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1e-3, 1e-6, 0.5])
)
def test_they_are_those_whose_error_numpy_finds_beyond_the_limit(tokens, width, seed, limit):
    golden = random(tokens, width, seed=seed)
    golden[seed % tokens] = 0.0  # a row of zeros
    size = 10.0 ** torch.randint(-8, 2, (tokens, 1), generator=torch.Generator().manual_seed(seed))
    mine = golden + size * random(tokens, width, seed=seed + 1)
    g, m = (x.double().numpy() for x in (golden, mine))
    norms = np.linalg.norm(g, axis=1)
    usual = np.median(norms[norms > 0]) if norms.any() else 0.0
    error = np.linalg.norm(m - g, axis=1) / np.maximum(norms, usual)
    assume(not np.isclose(error, limit, rtol=1e-5, atol=0).any())
    found = row(golden, mine, tokens=tokens, limit=limit).differing
    assert found is not None
    told = [number for first, last in found.spans or () for number in range(first, last + 1)]
    assert told == np.flatnonzero(error > limit).tolist()
    assert (found.share or 0.0) == len(told) / tokens


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("by_c", [True, False])
def test_a_row_with_nan_or_an_infinity_on_one_side_differs(value, side, by_c, monkeypatch):
    if not by_c:
        monkeypatch.setattr(sums.difference, "kernel", lambda: None)
    both = [random(1, 40, 16)] * 2
    both[side] = both[side].clone()
    both[side][0, 7, 3] = value
    assert says(*both) == "token 7 of 40 differs"
    for x in both:
        x[0, 7, 3] = value
    assert metrics.by_rows(*both)[1] is None  # on both sides it does not


def test_a_row_of_nan_alone_on_one_side_differs():
    golden = random(1, 40, 16)
    mine = golden.clone()
    mine[0, 39] = NAN
    assert says(golden, mine) == "token 39 of 40 differs"


def test_all_rows_are_said_to_be_all():
    golden = random(1, 40, 16)
    found = row(golden, golden * 2).differing
    assert found is not None
    assert (found.says, found.numbers) == ("all 40 tokens differ", "all")


def test_what_is_zero_in_golden_differs():
    golden = torch.zeros(1, 40, 16)
    golden[0, 5] = 1.0
    mine = golden.clone()
    mine[0, 6] = 1e-2
    assert says(golden, mine) == "token 6 of 40 differs"
    assert says(torch.zeros(1, 40, 16), mine) == "tokens 5-6 of 40 differ"


def test_a_tensor_of_one_row_has_none_to_tell():
    for shape in ((16,), (1, 16), (1, 1, 16), ()):
        golden = random(*shape)
        assert row(golden, golden * 2, tokens=1).differing is None


def test_no_rows_have_no_errors():
    assert metrics.by_rows(torch.zeros(0, 16), torch.zeros(0, 16))[1] is None


def test_what_only_all_rows_together_are_beyond_is_not_blamed_on_one():
    golden = random(1, 40, 16)
    found = row(golden, golden * 1.0001).differing
    assert found is not None
    assert (found.says, found.share) == ("no token by itself is beyond the limit", None)
    assert (found.where, found.numbers) == ("no token by itself", "none alone")


def test_of_many_spans_the_first_are_told_and_how_many_there_are():
    golden = random(1, 40, 16)
    text = says(golden, changed(golden, 0, slice(0, None, 2)))
    assert text == "tokens 0, 2, 4, 6, 8, 10, 12, 14, … (20 in all) of 40 differ"


def test_a_million_rows_are_told_to_within_a_block():
    golden = torch.ones(1_000_000, 2)
    mine = changed(golden, slice(123_456, 123_458))
    found = row(golden, mine, tokens=1_000_000).differing
    assert found is not None
    assert found.spans is not None
    ((first, last),) = found.spans
    block = math.ceil(1_000_000 / constants.TOLD_ROWS)
    assert first <= 123_456 <= 123_457 <= last
    assert last - first < 2 * block
    assert found.says == f"some of tokens {first}-{last} of 1,000,000 differ"
    errors = metrics.by_rows(golden, mine)[1]
    assert errors is not None
    assert sum(map(len, errors.errors)) <= 4 * constants.TOLD_ROWS
    last = says(golden, changed(golden, -1), tokens=1_000_000)
    assert last == "some of tokens 999845-999999 of 1,000,000 differ"  # 4081 * 245 = 999,845
    every = says(golden, changed(golden, slice(0, None, 100)), tokens=1_000_000)
    assert every == "some of tokens 0-999999 of 1,000,000 differ"  # not all of them


# -- what they are called -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((4, 40, 16), "tokens 12-19 of 40 in rows 1, 3 of the batch's 4 differ"),
        ((160, 16), "tokens 12-19 of 40 in rows 1, 3 of the batch's 4 differ"),
        ((4, 1, 40, 16), "tokens 12-19 of 40 in rows 1, 3 of the batch's 4 differ"),
    ],
)
def test_of_a_batch_its_rows_are_told(shape, text):
    golden = random(4, 40, 16)
    mine = golden.clone()
    mine[[1, 3], 12:20] *= 2
    assert says(golden.reshape(shape), mine.reshape(shape), batch=4) == text
    assert says(golden.reshape(shape), golden.reshape(shape) * 2, batch=4) == "all 40 tokens differ"


def test_a_batch_of_as_many_rows_as_tokens_is_told_apart_by_its_place():
    golden = random(4, 4, 16)
    mine = changed(golden, slice(None), 2)
    assert says(golden, mine, tokens=4, batch=4) == "token 2 of 4 differs"


def test_the_tokens_of_a_cache_are_those_of_the_text_so_far():
    golden = random(1, 2, 41, 16)
    mine = changed(golden, 0, 0, slice(12, None))
    assert says(golden, mine, tokens=1, total=41) == "tokens 12-40 of 41 differ"


@pytest.mark.parametrize(
    ("shape", "at", "text"),
    [
        ((30, 16), (slice(3, 6),), "rows 3-5 of 30 differ"),  # not as many as tokens
        ((3, 30, 16), (slice(None), 4), "row 4 of 30 along axis 1 differs"),
        ((1, 40, 40, 16), (0, 4), "row 4 of 40 along axis 1 differs"),  # which are the tokens?
    ],
)
def test_other_rows_are_called_rows(shape, at, text):
    golden = random(*shape)
    assert says(golden, changed(golden, *at)) == text


def test_rows_of_weights_are_no_tokens():
    golden = random(40, 16)
    assert says(golden, changed(golden, 3), role="weight") == "row 3 of 40 differs"


def test_without_a_known_batch_they_are_rows():
    golden = random(1, 40, 16)
    d = row(golden, changed(golden, 0, 3))
    d = Difference(0, d.pair, "diverged", d.error, LIMIT, d.metrics, rows=d.rows)
    assert d.differing is not None
    assert d.differing.says == "row 3 of 40 differs"


# -- other layouts --------------------------------------------------------------------------------


def test_mine_in_another_layout_has_golden_s_tokens():
    golden = random(1, 40, 16)
    mine = changed(golden, 0, slice(12, None)).transpose(1, 2).contiguous()
    moved = Fit("transposed", mine=(fits.permuted((0, 2, 1)),), whole=True)
    assert says(golden, mine, fit=moved) == "tokens 12-39 of 40 differ"


def test_golden_in_another_layout_keeps_the_numbers_of_its_tokens():
    golden = random(1, 16, 40)  # channels first
    mine = changed(golden, 0, slice(None), slice(12, None)).transpose(1, 2).contiguous()
    moved = Fit("transposed", golden=(fits.permuted((0, 2, 1)),), whole=True)
    assert says(golden, mine, fit=moved) == "tokens 12-39 of 40 differ"


def test_of_tokens_that_both_have_the_numbers_are_golden_s():
    golden = random(1, 40, 16)
    mine = changed(golden[:, 4:], 0, slice(26, None))  # mine lacks golden's first four
    both = BatchMap((1, 40), (1, 36), (TokenSpan(0, 4, 0, 0, 36),))
    fit = next(iter(both.fits((1, 40, 16), (1, 36, 16))))
    found = row(golden, mine, fit=fit).differing
    assert found is not None
    assert found.says == "tokens 30-39 of 40 differ"
    assert found.share == 10 / 36


def test_where_golden_s_tokens_lie_apart_they_are_rows():
    golden = random(40, 16)
    mixed = Fit("reshaped", golden=(fits.viewed((20, 32)),), mine=(fits.viewed((20, 32)),))
    assert says(golden, changed(golden, 6), fit=mixed) == "row 3 of 20 differs"


# -- not by values --------------------------------------------------------------------------------


def test_sizes_of_rows_tell_at_least_which_differ():
    golden = random(1, 40, 16)
    mine = changed(golden, 0, slice(12, 20))
    assert says(golden, mine, stats="sizes") == "at least tokens 12-19 of 40 differ"
    assert says(golden, golden * 2, stats="sizes") == "all 40 tokens differ"
    mine = golden.clone()
    mine[0, 5], mine[0, 6] = -golden[0, 5], NAN  # the sign changes no size
    assert says(golden, mine, stats="sizes") == "at least token 6 of 40 differs"


def test_a_part_of_each_row_tells_at_least_which_differ_and_a_part_of_the_rows_does_not():
    golden = random(1, 40, 16)
    mine = changed(golden, 0, slice(12, 20))
    of_each = (slice(None), slice(None), slice(0, 8))
    assert says(golden, mine, kept=of_each) == "at least tokens 12-19 of 40 differ"
    few = (slice(None), slice(10, 20))
    assert says(golden, mine, kept=few) == "which tokens differ is not known"
    elsewhere = golden.clone()
    elsewhere[..., :8] *= 1.0001  # it differs in what was not kept, as statistics say
    assert says(golden, elsewhere, kept=of_each) == "which tokens differ is not known"


def test_where_no_size_tells_it_is_unknown():
    golden = random(1, 40, 16)
    found = row(golden, -golden, stats="sizes").differing
    assert found == DifferingRows("token", 40)
    assert found.says == "which tokens differ is not known"
    assert says(golden, golden * 2, stats="whole") == "which tokens differ is not known"
    assert says(random(30, 16), random(30, 16), stats="whole") == "which rows differ is not known"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule.TOO_EVEN, ""),
        (Rule.CHANNEL_OFF, ""),
        (Rule.OTHER_SHAPE, ""),
        (Rule.USER_LIMIT, "which tokens differ is not known"),
        (Rule.COARSER, "all 40 tokens differ"),
    ],
)
def test_a_limit_of_the_whole_tensor_is_none_of_rows(rule, text):
    golden = random(1, 40, 16)
    assert says(golden, golden * 2, rule=rule) == text


def test_only_what_diverged_differs():
    golden = random(1, 40, 16)
    d = row(golden, golden * 2)
    for verdict in ("match", "within_noise", "expected", "unmatched"):
        one = Difference(0, d.pair, verdict, d.error, LIMIT, d.metrics, rows=d.rows)
        assert one.differing is None


# -- spans ----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 40)))
def test_spans_hold_the_numbers_and_touch_nowhere(numbers):
    found = spans.of(sorted(numbers))
    assert [n for first, last in found for n in range(first, last + 1)] == sorted(numbers)
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(found)]
    assert all(gap > 1 for gap in gaps)


# -- a comparison ---------------------------------------------------------------------------------


def late(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model whose layer 1 is off from token 12 on, in the last row of a batch."""

    def wrong(_module: object, _args: object, out: torch.Tensor) -> torch.Tensor:
        scale = torch.ones_like(out)
        scale[-1:, 12:] += 0.1 * torch.rand(out[-1:, 12:].shape)
        return out * scale

    model.get_submodule("model.layers.1.mlp.act_fn").register_forward_hook(wrong)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["values", "statistics"])
def report(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = recorded_both(
        llama(), late(llama()), lambda m: m(prompt(40, 2)), path=folder, stats_only=request.param
    )
    return ld.compare(*runs, progress=False)


def test_a_report_says_which_tokens_differ_in_text_page_list_and_table(report):
    where = "tokens 12-39 of 40 in row 1 of the batch's 2"
    by_size = report.differences[0].pair.golden.payload is None
    where = f"at least {where}" if by_size else where
    says = f"{where[0].upper()}{where[1:]} differ."
    assert report.verdict == "diverged"
    assert report.headlines()[0].which == says
    assert says in str(report)
    assert escape(says) in html.page(report.view())
    finding, d = report.findings[0], report.first_divergence
    assert says in finding_text(finding)
    assert escape(says) in html.finding_fragment(finding)
    assert f"{where} differ" in difference_text(d)
    assert d.differing.where == where
    assert d.differing.share == 28 / 40
    view = report.view()
    shown = view.row(row_request(d.index))["row"]
    assert shown["differing"] == where
    assert shown["which"] == f"12-39{', …' * by_size}"
    table = report.to_pandas()
    assert table.loc[d.index, "differing"] == where
    assert set(table.loc[table.verdict != "diverged", "differing"]) == {""}


def test_tokens_before_the_bug_never_differ(report):
    """Attention is causal, and the first text is right: values tell."""
    for d in report.differences:
        if d.verdict != "diverged" or d.pair.golden.payload is None:
            continue
        apart = (report.golden.load(d.pair.golden) != report.mine.load(d.pair.mine)).nonzero()
        assert set(apart[:, 0].tolist()) == {1}
        assert int(apart[:, -2].min()) >= 12
        assert d.differing.says.startswith("tokens 12-39 of 40"), d


def test_the_list_is_sorted_by_the_share_that_differs(report):
    view = report.view()
    request = {**EVERYTHING, "op": "rows", "step": 0, "start": 0, "n": 1000}
    rows = view.rows({**request, "sort": "which", "descending": True})["rows"]
    shares = [found and found.share for r in rows if (found := view.differences[r["id"]].differing)]
    known = [share for share in shares if share is not None]
    assert known == sorted(known, reverse=True)
    assert [bool(r["differing"]) for r in rows[: len(known)]] == [True] * len(known)
