"""The examples of docs/from_*.md, run as a reader would run them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from llmdebug_nb.cli import main
from test_readme import MODELS

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ("from_msit.md", "from_msprobe.md", "from_torchair.md")


@pytest.mark.parametrize("doc", PAGES)
def test_the_examples_of_a_page_run_in_their_order(doc, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMDEBUG_RUNS", raising=False)
    text = (DOCS / doc).read_text(encoding="utf-8")
    names: dict[str, Any] = {"small": torch.nn.Linear(4, 4), "x": torch.ones(2, 4)}
    exec(MODELS, names)
    run = 0
    for language, code in re.findall(
        r"^```(python|sh)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    ):
        if language == "python":
            exec(code, names)
            continue
        for line in code.splitlines():
            status = main(shlex.split(line)[1:])
            assert status in ((0, 1) if " compare " in line else (0,)), (
                f"{line}: {capsys.readouterr().err}"
            )
            run += 1
    assert run >= 2


@pytest.mark.parametrize("doc", [*PAGES, "upstream.md", "layouts.md"])
def test_what_a_page_names_is_there(doc):
    text = (DOCS / doc).read_text(encoding="utf-8")
    for place in re.findall(r"\]\(([A-Za-z0-9_./-]+)\)", text):
        assert (DOCS / place).exists(), place
    files = "".join(
        file.read_text(encoding="utf-8") for file in DOCS.parent.glob("tests/test_*.py")
    )
    for test in re.findall(r"`(test_\w+)`", text):
        assert f"def {test}(" in files, test
    for file in re.findall(r"`(test_\w+\.py)`", text):
        assert (DOCS.parent / "tests" / file).exists(), file


def test_the_counts_of_the_table_add_up_and_what_is_not_open_has_a_test():
    text = (DOCS / "upstream.md").read_text(encoding="utf-8")
    items = text.partition("## Bugs")[0]
    rows = re.findall(r"^\| .+ \| (works|differs|open)(: .+)? \| (.*?) ?\|$", items, re.MULTILINE)
    counts = Counter(state for state, _, _ in rows)
    left = counts["open"] or "none"
    assert (
        f"Of {len(rows)} items {counts['works']} work, {counts['differs']} differ by intent, with"
        f" the reason, and {left} is open."
    ) in items
    assert len(rows) == sum(line.startswith("| ") for line in items.splitlines()) - 2 * (
        items.count("| item | state |")
    )
    for state, reason, test in rows:
        assert test.startswith("`test_") or state == "open"
        assert reason or state == "works"
