"""How findings are shown: both lines, the relation, the lines around, and the rows that matter."""

import html
import re
from dataclasses import replace

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.records import Frame, Record, Site, Summary
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.findings.summary import sentences
from llmdebug_nb.show.findings import detail
from llmdebug_nb.show.html import finding_fragment
from llmdebug_nb.show.telling import rows
from llmdebug_nb.show.text import finding_text
from llmdebug_nb.source.lines import LinePair, Source
from models import llama, prompt

GOLDEN = Source(
    "attn/Torch.mul", "Torch.mul", "/a/model.py", 12, "w = w * scale",
    (Frame("/a/model.py", 12, "forward"),),
)  # fmt: skip
MINE = Source(
    "attn/Torch.div", "Torch.div", "/b/port.py", 30, "w = w / <scale>",
    (Frame("/b/port.py", 30, "scaled"), Frame("/b/port.py", 41, "forward")),
)  # fmt: skip
PAIRS = (
    LinePair(replace(GOLDEN, line=11, code="w = q @ k"), MINE, 1e-7, "rewritten"),
    LinePair(GOLDEN, None, None, "guilty"),
)


def finding(cause=causes.SCALAR, **rest):
    return Finding("attn/Torch.mul", "Torch.mul", 0, cause, "it differs", **rest)


def test_text_has_both_lines_their_code_the_relation_and_the_lines_around():
    text = finding_text(
        finding(golden=GOLDEN, mine=MINE, pairs=PAIRS, relation="mine is golden's times 0.5")
    )
    assert "Mine is golden's times 0.5." in text
    assert "golden: /a/model.py:12 forward  w = w * scale" in text
    assert "mine:   /b/port.py:30 scaled  w = w / <scale>" in text
    table = [re.split(r"  +", line) for line in text.splitlines() if line.startswith(("r", "gu"))]
    assert table[0] == [
        "rewritten",
        "model.py:11",
        "w = q @ k",
        "port.py:30",
        "w = w / <scale>",
        "1e-07",
    ]
    assert table[1] == ["guilty", "model.py:12", "w = w * scale", "-", "-"]


def test_a_side_without_the_call_says_so():
    text = finding_text(finding(golden=GOLDEN))
    assert "mine:   does it otherwise, or not at all" in text


def test_sources_that_say_no_more_than_the_finding_are_left_out():
    module = Source("attn", "Attention")
    assert detail(finding(golden=module, mine=module), "")["sources"] == []
    other = Source("attention", "FusedAttention")
    shown = detail(finding(golden=module, mine=other), "")["sources"]
    assert [side["call"] for side in shown] == ["attn (Attention)", "attention (FusedAttention)"]
    assert detail(finding(), "")["sources"] == []


def test_html_has_both_sources_as_text_and_the_lines_folded():
    page = finding_fragment(finding(golden=GOLDEN, mine=MINE, pairs=PAIRS, relation="a < b"))
    assert "<scale>" not in page
    assert "w = w / <scale>" in html.unescape(page)
    assert "called at /b/port.py:41 forward" in page
    assert "A &lt; b." in page
    folded = page[page.index("Line by line") :]
    assert page.count("<details>") == 1
    assert "guilty" in folded


def summary(one):
    return sentences(("golden", "mine"), "diverged", [], [one])


def test_the_advice_is_the_findings_own_if_it_has_one():
    assert "Swap the halves." in summary(finding(advice="swap the halves"))
    assert "golden's value" not in summary(finding(advice="Swap the halves."))
    assert "Set it to golden's value" in summary(finding(golden=GOLDEN, mine=GOLDEN))


@pytest.mark.parametrize(
    "one",
    [
        finding(golden=GOLDEN, mine=MINE),
        finding(golden=GOLDEN, mine=GOLDEN, pairs=PAIRS[:1]),
    ],
)
def test_code_that_is_written_otherwise_is_never_told_to_take_goldens_value(one):
    assert "golden's value" not in summary(one)
    assert "Look at this code in both programs." in summary(one)


def test_the_relation_is_a_sentence_of_the_summary():
    assert "it differs. The heads are in another order. " in summary(
        finding(relation="the heads are in another order")
    )


def row(index, verdict, path="a", role="output"):
    summary = Summary("float32", (2,), 0.0, 1.0, 0.5, 1.0, 0, 0, 0, None)
    record = Record(index, Site(path, role=role), index, "Linear", summary)
    error = {"match": 0.0, "diverged": 1.0}.get(verdict)
    return Difference(index, Pair(record, record, ""), verdict, error, 0.1)


def test_the_rows_of_findings_come_before_earlier_mismatches():
    differences = [row(i, "unmatched") for i in range(50)]
    differences += [row(50, "match", "b", "input"), row(51, "diverged", "b"), row(52, "diverged")]
    blamed = replace(finding(), difference=differences[51])
    indexes = [d.index for d in rows(differences, [blamed], 5)]
    assert indexes == [0, 1, 50, 51, 52]
    assert [d.index for d in rows(differences, [blamed], 1)] == [51]
    assert [d.index for d in rows(differences, [], 2)] == [51, 52]
    assert rows([row(0, "match")], [], 5) == []


def test_a_report_shows_both_lines_and_the_row_that_is_blamed(tmp_path):
    def recorded(name, factor):
        model = llama()
        mlp = model.model.layers[1].mlp

        def forward(x):
            return mlp.down_proj(torch.mul(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), factor))

        mlp.forward = forward
        with ld.dump(model, name=name, mode="module+api") as run:
            model(prompt())
        return run

    report = ld.compare(recorded("golden", 1.0), recorded("mine", 1.5))
    text = str(report)
    head, _, table = text.rpartition("\nstep ")
    code = "return mlp.down_proj(torch.mul(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), factor))"
    assert f"mine:   {report.findings[0].mine}  {code}" in head
    assert f"golden: {report.findings[0].golden}  {code}" in head
    assert report.findings[0].difference.site.path in table
    page = report.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.unescape(page).count(code) >= 2
