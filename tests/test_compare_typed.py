"""``llmdebug compare`` with msit's flags, and msit's tables of it."""

from __future__ import annotations

import csv
import math
import re
import zipfile
from pathlib import Path

import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.app.upstream.compare_tables import METRICS, to_pandas
from llmdebug_nb.cli import main
from llmdebug_nb.comparison import metrics
from models import llama, prompt

COLUMNS = [
    "token_id", "data_id",
    "golden_data_path", "golden_op_type", "golden_dtype", "golden_shape", "golden_max_value",
    "golden_min_value", "golden_mean_value",
    "my_data_path", "my_op_type", "my_dtype", "my_shape", "my_max_value", "my_min_value",
    "my_mean_value",
    "cosine_similarity", "max_relative_error", "mean_relative_error", "max_absolute_error",
    "mean_absolute_error", "kl_divergence", "relative_euclidean_distance", "cmp_fail_reason",
]  # fmt: skip


@pytest.fixture
def runs():
    model = llama()
    with ld.dump(model, name="golden", mode="module+api", weights=True):
        model(prompt())
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    with ld.dump(model, name="mine", mode="module+api", weights=True):
        model(prompt())


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def _table(folder: Path, pattern: str = "msit_cmp_report_*.csv") -> pandas.DataFrame:
    return pandas.read_csv(_only(folder, pattern))


@pytest.mark.parametrize(
    "flags",
    [["-gp", "golden", "-mp", "mine"], ["--golden-path", "golden", "--my-path", "mine"],
     ["golden", "mine"]],
)  # fmt: skip
def test_both_forms_are_one_command(runs, tmp_path, flags, capsys):
    assert main(["compare", *flags, "-o", str(tmp_path)]) == 1
    assert "→ A weight differs in lm_head (Linear)" in capsys.readouterr().out
    table = _table(tmp_path)
    assert list(table) == COLUMNS
    assert len(table) == len(ld.compare("golden", "mine", progress=False).differences)


def test_msits_form_without_a_folder_writes_here(runs, tmp_path, monkeypatch):
    runs_folder = Path.cwd() / "llmdebug_runs"
    monkeypatch.chdir(tmp_path)
    path = str(Path(ld.open_run("golden").path or runs_folder))
    assert main(["compare", "-gp", path, "-mp", path, "-l", "error"]) == 0
    assert len(_table(tmp_path))
    assert _only(tmp_path, "msit_cmp_report_*.xlsx").exists()


def test_each_level_has_its_rows_and_the_divergence_of_softmax(runs, tmp_path):
    report = ld.compare("golden", "mine", progress=False)
    sizes = {}
    for level in ("layer", "module", "api", "logits", "token"):
        folder = tmp_path / level
        assert main(["compare", "golden", "mine", "-cl", level, "-o", str(folder)]) == 1
        table = _table(folder)
        sizes[level] = len(table)
        assert table.kl_divergence.notna().all() or table.cmp_fail_reason.notna().any()
        assert not list(folder.glob("*.xlsx"))
        for column in ("golden_data_path", "my_data_path"):
            assert table[column].str.contains("output[", regex=False).all()
    assert (sizes["layer"], sizes["logits"], sizes["token"]) == (2, 2, 2)
    assert sizes["module"] > sizes["layer"]
    assert sizes["api"] > 0
    assert sizes["module"] + sizes["api"] < len(report.differences)


def test_the_divergence_of_each_pair_is_that_of_its_values(runs):
    report = ld.compare("golden", "mine", progress=False)
    table = to_pandas(report)
    checked = 0
    for d, got in zip(report.differences, table.kl_divergence, strict=True):
        if d.pair.golden is None or d.pair.mine is None or not d.metrics.get("mismatched"):
            continue
        p = torch.softmax(report.golden.load(d.pair.golden).double().flatten(), 0)
        q = torch.softmax(report.mine.load(d.pair.mine).double().flatten(), 0)
        assert got == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6, abs=1e-12)
        checked += 1
    assert checked > 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=40))
def test_the_divergence_is_never_negative_and_that_of_its_definition(pairs):
    g, m = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    p, q = torch.log_softmax(g, 0), torch.log_softmax(m, 0)
    wanted = float((p.exp() * (p - q)).sum())
    got = metrics.divergence(g, m)
    assert got is not None
    assert got >= 0
    assert math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-9)
    assert metrics.divergence(g, torch.full_like(g, math.nan)) is None


def test_statistics_alone_leave_the_divergence_empty_and_say_why(tmp_path):
    model = llama()
    for name in ("golden", "mine"):
        with ld.dump(model, name=name, stats_only=True):
            model(prompt())
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
    main(["compare", "-gp", "golden", "-mp", "mine", "-o", str(tmp_path)])
    table = _table(tmp_path)
    empty = table[table.kl_divergence.isna()]
    assert len(empty)
    assert empty.cmp_fail_reason.str.contains("no values on golden").all()
    assert main(["compare", "golden", "mine", "-st", "-o", str(tmp_path)]) == 1
    stats = _table(tmp_path, "statstics_cmp_report_*.csv")
    assert stats.l2norm_stat_relative_error.max() == pytest.approx(0.01, rel=0.01)


def test_weights_are_a_level_and_a_level_without_rows_is_an_error(runs, tmp_path, capsys):
    assert main(["compare", "golden", "mine", "-w", "-o", str(tmp_path)]) == 1
    assert _table(tmp_path).golden_data_path.str.contains("weight").all()
    with ld.dump(model := torch.nn.Linear(2, 2), name="tiny"):
        model(torch.ones(1, 2))
    assert main(["compare", "tiny", "tiny", "-cl", "layer"]) == 3
    assert "-cl layer: none of" in capsys.readouterr().err


def test_the_sheets_of_the_workbook_are_the_levels(runs, tmp_path):
    main(["compare", "golden", "mine", "-o", str(tmp_path)])
    with zipfile.ZipFile(_only(tmp_path, "*.xlsx")) as book:
        names = re.findall('<sheet name="(.*?)"', book.read("xl/workbook.xml").decode())
        last = book.read("xl/worksheets/sheet5.xml").decode()
    assert names == ["layer", "module", "api", "logits", "all"]
    assert re.findall("<t [^>]*>(.*?)</t>", last)[: len(COLUMNS)] == COLUMNS


def test_a_users_metric_is_a_column_before_the_reason(runs, tmp_path):
    (tmp_path / "mine.py").write_text("def gap(golden, mine):\n    return 2.5, 'a message'\n")
    flags = ["-alg", f"{tmp_path / 'mine.py'}:gap", "-o", str(tmp_path)]
    main(["compare", "-gp", "golden", "-mp", "mine", *flags])
    table = _table(tmp_path)
    assert list(table)[-2:] == ["gap", "cmp_fail_reason"]
    assert (table.gap.dropna() == 2.5).all()
    assert list(table)[16:23] == list(METRICS)


@pytest.mark.parametrize(
    ("level", "lines"), [("fatal", 1), ("critical", 1), ("error", 1), ("warning", None)]
)
def test_the_log_level_says_how_much_is_printed(runs, capsys, level, lines):
    main(["compare", "golden", "mine"])
    whole = capsys.readouterr().out
    assert main(["compare", "golden", "mine", "--log-level", level]) == 1
    text = capsys.readouterr().out
    assert text.startswith("Verdict: diverged")
    assert len(text) < len(whole)
    assert lines is None or len(text.splitlines()) == lines


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["golden", "-mp", "mine"], "not both"),
        (["-gp", "golden"], "mine (MINE or -mp) is missing"),
        (["-mp", "mine"], "golden (GOLDEN or -gp) is missing"),
    ],
)
def test_half_a_form_is_an_error(flags, says, capsys):
    assert main(["compare", *flags]) == 3
    assert says in capsys.readouterr().err


def test_every_table_names_the_tensor_of_each_side(runs, tmp_path):
    report = ld.compare("golden", "mine", progress=False)
    report.to_csv(tmp_path / "d.csv")
    with open(tmp_path / "d.csv", encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    for d, row, shown in zip(
        report.differences, report.to_pandas().itertuples(), written, strict=True
    ):
        for side, record in (("golden", d.pair.golden), ("mine", d.pair.mine)):
            named = None if record is None else str(record.site)
            assert getattr(row, side) == named
            assert shown[side] == (named or "")


def test_msits_mapping_file_is_read_from_its_folder(tmp_path, capsys):
    for name, made in (("golden", torch.nn.Linear), ("mine", _Projection)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(made(8, 8), torch.nn.Tanh())
        with ld.dump(model, name=name, path=tmp_path):
            model(torch.ones(2, 8))
    (tmp_path / "maps").mkdir()
    file = tmp_path / "maps/op_mapping_file.json"
    file.write_text('{"_Projection_outtensor0": ["Linear_output_0"]}', encoding="utf-8")
    sides = ["-gp", str(tmp_path / "golden"), "-mp", str(tmp_path / "mine")]
    line = ["compare", *sides, "-o", str(tmp_path / "out"), "-mf"]
    assert main([*line, str(tmp_path / "maps")]) == 0
    file.write_text("{", encoding="utf-8")
    assert main([*line, str(tmp_path / "maps")]) == 3
    assert "op_mapping_file.json" in capsys.readouterr().err


class _Projection(torch.nn.Linear):
    """A Linear under another name."""
