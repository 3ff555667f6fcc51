"""Coverage: how much of golden was found in mine, and when two runs are incomparable."""

import html

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.cli import main
from llmdebug_nb.comparison.coverage import coverage, why_incomparable
from llmdebug_nb.comparison.differences import Coverage, Difference, Reach
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.records import Record, Site, Summary
from models import gpt2, llama, prompt

KIND = "float32 [8, 8]"
OURS, THEIRS = [(KIND, "xxh3:a")], [(KIND, "xxh3:b")]


def row(path, verdict, *, content, role="output", sides="both", error=None, **rest):
    """A difference of a float tensor; ``content`` stands for its bytes."""
    at, rule = rest.pop("step", 0), rest.pop("rule", Rule.NOISE)
    reason = rest.pop("why", Reason.SAME_SITE)
    number = row.number = getattr(row, "number", 0) + 1
    summary = Summary("float32", (2, 8), -1.0, 1.0, 0.0, 3.0, 0, 0, 0, f"xxh3:{content}")
    record = Record(number, Site(path, at, role=role, **rest), number, "Linear", summary)
    golden, mine = (record if sides in ("both", side) else None for side in ("golden", "mine"))
    pair = Pair(golden, mine, reason.text, reason=reason)
    metrics = {} if error is None else {"relative_euclidean_distance": error}
    return Difference(number, pair, verdict, error, 1e-6, metrics, rule=rule)


def test_values_are_counted_once_wherever_they_are_seen():
    rows = [
        row("", "match", content="x", role="input", error=0.0),
        row("fc", "match", content="x", role="input", error=0.0),
        row("fc", "within_noise", content="y", error=1e-7),
        row("", "within_noise", content="y", error=1e-7),
    ]
    assert coverage(rows) == Coverage(1, 1, 2, 2, 0)


def test_a_value_written_otherwise_is_no_match_but_counts():
    rows = [
        row("fc/Torch.mul", "unmatched", content="scaled", sides="golden", rule=Rule.REJOINED),
        row("fc/Torch.add", "match", content="sum", error=0.0),
        row("fc", "match", content="sum", error=0.0),
        row("", "diverged", content="out", error=0.5),
    ]
    assert not rows[0].is_mismatch
    found = coverage(rows)
    assert found == Coverage(1, 0, 3, 1, 1)
    assert found.share == 2 / 3


def test_what_mine_did_not_record_or_cannot_have_does_not_count():
    rows = [
        row("", "match", content="out", error=0.0),
        row("", "unmatched", content="later", sides="golden", step=1),  # mine has no step 1
        row("fc/Torch.mul", "unmatched", content="inner", sides="golden"),  # nor operators
        row("fc", "unmatched", content="folded", sides="golden", why=Reason.FOLDED),
        row("fc", "unmatched", content="own", sides="golden"),
    ]
    assert coverage(rows) == Coverage(1, 1, 2, 1, 0)


def test_gradients_are_results():
    rows = [
        row("", "match", content="out", error=0.0),
        row("fc", "match", content="inner", error=0.0),
        row("fc", "diverged", content="of a weight", role="grad", phase="backward", error=0.1),
        row("", "match", content="of an input", phase="backward", error=0.0),
    ]
    assert (coverage(rows).observables, coverage(rows).observables_matched) == (3, 2)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.booleans())))
def test_coverage_counts_as_sets_do(facts):
    rows = [
        row("fc", "match" if same else "diverged", content=content, error=0.0 if same else 0.5)
        if paired
        else row("fc", "unmatched", content=content, sides="golden")
        for content, same, paired in facts
    ]
    rows.append(row("", "match", content="out", error=0.0))
    found = coverage(rows)
    assert found.values == len({content for content, _, _ in facts} | {"out"})
    agreeing = {content for content, same, paired in facts if same and paired} | {"out"}
    assert found.values_matched == len(agreeing)
    assert found.share == len(agreeing) / found.values


def test_a_share_is_never_rounded_up_to_all():
    assert "99 % of golden's 1,000 values" in str(Coverage(1, 1, 1000, 999))
    assert "100 %" in str(Coverage(1, 1, 1000, 999, 1))


def test_few_partners_and_no_result_are_incomparable():
    alone = [row(f"a{i}", "unmatched", content=i, sides="golden") for i in range(3)]
    alone += [row(f"b{i}", "unmatched", content=i, sides="mine") for i in range(4)]
    paired = [row("deep.inside", "match", content="same", error=0.0)]
    root = row("", "unmatched", content="out", sides="golden")
    why = why_incomparable([*alone, *paired, root], OURS, OURS)
    assert "only 1 of golden's 5 tensors have a partner" in why
    assert "golden has e.g. a0, mine b0" in why
    # a result with a partner, or half of the smaller run, is enough
    result = row("", "diverged", content="out", error=0.2)
    assert why_incomparable([*alone, *paired, result], OURS, OURS) == ""
    more = [row(f"c.{i}", "match", content=f"c{i}", error=0.0) for i in range(3)]
    assert why_incomparable([*alone, *paired, *more, root], OURS, OURS) == ""


@pytest.mark.parametrize(
    ("error", "mine", "says"),
    [
        (1.4, THEIRS, "no weight matrix of golden is in mine"),
        (float("inf"), THEIRS, "no weight matrix of golden is in mine"),
        (0.4, THEIRS, ""),  # another checkpoint of the same model
        (1.4, OURS, ""),  # a bug in the first layer
        (1.4, [("bfloat16 [8, 8]", "xxh3:b")], ""),  # bytes of another dtype say nothing
        (1.4, [], ""),  # fingerprints were not recorded
    ],
)
def test_models_without_a_common_weight_are_unrelated_if_their_values_are(error, mine, says):
    vectors = [("float32 [8]", "xxh3:ones")]  # equal in any two models
    rows = [
        row("", "match", content="ids", role="input", error=0.0),
        row("fc", "diverged", content="a", error=error),
        row("", "diverged", content="b", error=error),
    ]
    why = why_incomparable(rows, OURS + vectors, mine + vectors)
    assert why.startswith(says)
    assert bool(why) == bool(says)


def _recorded(name, model, **options):
    with ld.dump(model, name=name, **options):
        model(prompt())
    return name


def test_models_of_different_weights_are_unrelated_whatever_their_names():
    torch.manual_seed(1)
    other = llama()
    with torch.no_grad():
        for weight in other.parameters():
            weight.normal_()
    report = ld.compare(_recorded("a", llama()), _recorded("b", other))
    assert report.verdict == "incomparable"
    assert "no weight matrix" in report.summary()
    assert report.findings == []


def test_unrelated_architectures_are_incomparable():
    report = ld.compare(_recorded("a", llama()), _recorded("b", gpt2()))
    assert report.verdict == "incomparable", report


def test_one_wrong_weight_is_comparable():
    mine = llama()
    with torch.no_grad():
        mine.model.embed_tokens.weight.copy_(-mine.model.embed_tokens.weight)
    report = ld.compare(_recorded("a", llama()), _recorded("b", mine))
    assert report.verdict == "diverged"
    assert report.coverage.observables_matched == 0


def test_a_model_against_itself_is_covered_to_the_last_value():
    report = ld.compare(_recorded("a", llama()), _recorded("b", llama()))
    assert report.coverage.share == 1.0
    assert report.coverage.values == report.coverage.values_matched > 10
    assert report.coverage.observables == report.coverage.observables_matched == 1
    assert "100 % of golden's" in report.lines()[1]
    assert "100 % of golden's" in report.summary()


def test_a_pass_on_little_of_golden_says_so_in_its_first_line(tmp_path):
    rows = Coverage(observables=0, values=20, values_matched=1)
    assert rows.caution == "but on only 5 % of golden's values"
    assert Coverage(2, 0, 20, 20).caution == "but 0 of golden's 2 results agree"
    assert Coverage(2, 1, 20, 10).caution == ""
    _recorded("a", llama())
    report = ld.compare("a", _recorded("b", llama(), layers="model.embed_tokens"))
    assert str(report).splitlines()[0] == "a against b: match, but 0 of golden's 1 result agree"
    assert "match, but 0 of golden's" in repr(report)
    assert report.caution in html.unescape(
        report.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    )
    assert report.coverage.values > 10
    # what both selected is all that can be covered
    same = ld.compare(_recorded("c", llama(), layers="model.embed_tokens"), "b")
    assert str(same).splitlines()[0] == "c against b: match"
    all_of_it = Reach((1, 1), (7, 7))
    assert same.coverage == Coverage(1, 1, 2, 2, 0, all_of_it, all_of_it)


def test_the_exit_status_of_incomparable_runs_is_2(capsys):
    _recorded("a", llama(), layers="*.mlp.*")
    _recorded("b", gpt2(), layers="*.mlp.*")
    assert main(["compare", "a", "b"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("a against b: incomparable\n")
    assert "no site in common" in out
    with pytest.raises(SystemExit, match="3"):  # wrong arguments are errors, not an answer
        main(["compare", "a", "b", "--nosuch"])
