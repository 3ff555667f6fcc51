"""msit itself writes dumps that we open, and reads and compares what we write: make test-upstream.

Its Python code runs on a CPU; ATB's ``.bin`` files are written by its probe alone, in C++.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.msit import DumpConfig, register_hook
from msit_program import LAYERS, TOKENS, made, run
from upstream_python import ran

ROOT = Path(__file__).parent.parent
UPSTREAM = Path(os.environ.get("LLMDEBUG_UPSTREAM_MSIT", ROOT / ".venv" / "upstream-msit"))
PROGRAM = Path(__file__).with_name("msit_program.py")
FIGURES = (
    "cosine_similarity", "max_relative_error", "mean_relative_error", "max_absolute_error",
    "mean_absolute_error", "kl_divergence", "relative_euclidean_distance",
)  # fmt: skip
pytestmark = pytest.mark.skipif(
    not (UPSTREAM / "components" / "llm").is_dir(),
    reason="msit is not here: make test-upstream installs it, apart",
)


def _upstream(*words: str | Path) -> str:
    return ran([UPSTREAM, UPSTREAM / "components" / "llm"], PROGRAM, *words)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A dump of two tokens, written by msit: tensors, statistics, weights and the analysis."""
    folder = tmp_path_factory.mktemp("msit")
    _upstream("record", folder)
    (dump,) = folder.glob("msit_dump_*")
    return dump


def _process(dump: Path) -> Path:
    (folder,) = (tree.parent for tree in dump.rglob("model_tree.json"))
    return folder


def _compared(golden: Path, mine: Path, folder: Path) -> list[dict[str, str]]:
    """Return the rows of msit's own comparison of the modules of two dumps."""
    folder.mkdir()
    sides = ("-gp", _process(golden), "-mp", _process(mine))
    _upstream("compare", *sides, "-o", folder, "-cl", "layer")
    return _rows(folder)


def _rows(folder: Path) -> list[dict[str, str]]:
    (table,) = folder.glob("msit_cmp_report_*.csv")
    with open(table, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _recorded(folder: Path, bug: int | None = None) -> Path:
    """Record the program here, and export the run in msit's layout. ``bug``: a layer's number."""
    model = made()
    if bug is not None:
        model.layers[bug].fc2.bias.data.add_(1)
    hook = register_hook(model, DumpConfig(folder, [0, 1], dump_weight=True))
    run(model)
    ld.export_dump(hook.stop(), folder / "exported", layout="msit")
    return folder / "exported"


def _path(name: str) -> str:
    return name.removeprefix("root").removeprefix(".")


def _bytes(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.detach().contiguous().numpy().tobytes()


def test_every_tensor_that_msit_wrote_is_opened_at_its_place(theirs):
    opened = ld.open_run(theirs)
    files = list(theirs.rglob("*.pth"))
    read = [opened.load(record) for record in opened.records() if record.payload is not None]
    assert Counter(map(_bytes, read)) == Counter(_bytes(torch.load(file)) for file in files)
    assert len(files) > 4 * LAYERS * TOKENS
    assert not [record for record in opened.records() if record.lost]
    for file in files:
        if file.parent.name == "weights":
            continue
        path, (role, *slots) = _path(file.parent.name), file.stem.split("_")
        record = next(
            opened.records(
                path=path, step=int(file.parts[-3]), role=role, slot=".".join(slots) or "0"
            )
        )
        assert torch.equal(opened.load(record), torch.load(file))


def test_the_statistics_that_msit_wrote_are_those_of_our_records(theirs):
    opened, seen = ld.open_run(theirs), 0
    for table in theirs.rglob("statistics.csv"):
        step = int(table.parts[-3])
        with open(table, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                path = _path(row["NodeName"])
                wanted = {"path": path, "step": step, "role": row["InputOutput"].lower()}
                summary = next(opened.records(slot=row["Index"], **wanted)).summary
                for name in ("Max", "Min", "Mean", "L2Norm"):
                    ours = getattr(summary, name.lower())
                    assert float(row[name]) == pytest.approx(ours, rel=1e-4, abs=1e-6)
                seen += 1
    assert seen > 4 * LAYERS * TOKENS


def test_our_recording_of_the_same_program_agrees_with_msits(theirs, tmp_path):
    model = made()
    hook = register_hook(model, DumpConfig(tmp_path, [0, 1], name="ours"))
    run(model)
    report = ld.compare(theirs, hook.stop(), progress=False)
    assert report.verdict == "match"
    assert sum(d.verdict == "match" for d in report.differences) > 4 * LAYERS * TOKENS


def test_msits_compare_takes_what_we_export_and_finds_the_planted_bug(theirs, tmp_path):
    right, wrong = _recorded(tmp_path / "right"), _recorded(tmp_path / "wrong", bug=7)
    for golden, name in ((right, "same"), (theirs, "mixed")):
        rows = _compared(golden, right, tmp_path / name)
        assert len(rows) == LAYERS * TOKENS
        assert {row["max_absolute_error"] for row in rows} == {"0.0"}
    rows = _compared(right, wrong, tmp_path / "bug")
    bad = {Path(row["golden_data_path"]).parent.name for row in rows
           if float(row["max_absolute_error"]) > 0.1}  # fmt: skip
    assert bad == {f"root.layers.{number}" for number in range(7, LAYERS)}


def test_our_table_has_msits_columns_and_figures(tmp_path):
    right, wrong = _recorded(tmp_path / "right"), _recorded(tmp_path / "wrong", bug=7)
    theirs = _compared(right, wrong, tmp_path / "theirs")
    words = ["-gp", str(right), "-mp", str(wrong), "-cl", "layer", "-o", str(tmp_path / "ours")]
    assert main(["compare", *words]) == 1
    ours = _rows(tmp_path / "ours")
    assert list(ours[0]) == list(theirs[0])
    layers = [row for row in ours if row["golden_op_type"] == "Block"]
    figures = [
        {(row["token_id"], row["golden_mean_value"][:6]): row for row in rows}
        for rows in (layers, theirs)
    ]
    assert len(theirs) == LAYERS * TOKENS
    for key, row in figures[1].items():
        for name in FIGURES:
            assert float(figures[0][key][name]) == pytest.approx(
                float(row[name]), rel=1e-3, abs=1e-6
            )


def test_msits_reader_takes_each_bin_that_we_write(tmp_path):
    model = made()
    with ld.dump(model, name="ours", path=tmp_path) as recorded:
        run(model)
    ld.export_dump(recorded, tmp_path / "atb", layout="atb")
    _upstream("read", tmp_path / "atb", tmp_path / "read.pt")
    read = torch.load(tmp_path / "read.pt")
    ours = [recorded.load(record) for record in recorded.records() if record.payload is not None]
    assert Counter(map(_bytes, read.values())) == Counter(map(_bytes, ours))
    assert len(read) > 4 * LAYERS * TOKENS
