"""msprobe itself writes a dump that we open, and compares what we write: make test-upstream."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from msprobe_program import made
from upstream_python import ran

ROOT = Path(__file__).parent.parent
UPSTREAM = Path(os.environ.get("LLMDEBUG_UPSTREAM", ROOT / ".venv" / "upstream"))
pytestmark = pytest.mark.skipif(
    not (UPSTREAM / "msprobe").is_dir(),
    reason="mindstudio-probe is not here: make test-upstream installs it, apart",
)


def _upstream(*words: str | Path) -> str:
    return ran([UPSTREAM], *words)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A dump of two training steps, written by msprobe."""
    folder = tmp_path_factory.mktemp("msprobe") / "dump"
    _upstream(Path(__file__).with_name("msprobe_program.py"), folder)
    return folder


def _compared(golden: Path, mine: Path, folder: Path) -> list[dict[str, str]]:
    """Return the rows of msprobe's own comparison of two dumps of a step."""
    folder.mkdir()
    (target,), (bench,) = (list(path.rglob("dump.json")) for path in (mine, golden))
    said = _upstream("-m", "msprobe.msprobe", "compare", "-tp", target, "-gp", bench, "-o", folder)
    (table,) = folder.glob("compare_result_*.csv")
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows, said
    return rows


def _bytes(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.contiguous().numpy().tobytes()


def test_every_tensor_that_msprobe_wrote_is_opened_with_its_values(theirs):
    run = ld.open_run(theirs)
    files = [torch.load(file) for file in theirs.rglob("*.pt")]
    assert len(files) > 60
    read = [run.load(record) for record in run.records() if record.payload is not None]
    assert Counter(map(_bytes, read)) == Counter(map(_bytes, files))


def test_its_names_are_our_sites(theirs):
    run = ld.open_run(theirs)
    name = re.compile(r"Module\.(\w+)\.\w+\.forward\.0\.(input|output)\.(\d+)\.pt")
    seen = 0
    for file in theirs.rglob("*.pt"):
        if found := name.fullmatch(file.name):
            path, role, slot = found.groups()
            step = int(re.search(r"/step(\d+)/", file.as_posix())[1])
            record = next(run.records(path=path, step=step, role=role, slot=slot, phase="forward"))
            assert torch.equal(run.load(record), torch.load(file))
            seen += 1
    assert seen == 12


def test_its_calls_have_their_lines(theirs):
    run = ld.open_run(theirs / "step0")
    for path in ("fc1", "fc1/Functional.linear"):
        assert [frame.rpartition("/")[2].partition(":")[2] for frame in run.stack(path)][:2] == [
            "19 forward", "37 main",
        ]  # fmt: skip


def test_a_recording_of_the_same_program_agrees_with_msprobes(theirs, tmp_path):
    model, x = made()
    with ld.dump(model, name="ours", mode="module+api"):
        model(x)
    report = ld.compare(theirs / "step0", "ours", progress=False)
    modules = [d for d in report.differences if d.site.path in ("fc1", "act", "fc2")]
    outputs = [d for d in modules if d.site.role == "output" and d.site.phase == "forward"]
    assert len(outputs) == 3
    assert {d.verdict for d in outputs} == {"match"}
    assert not any(d.verdict == "diverged" for d in report.differences)


def test_msprobes_compare_takes_what_we_export(theirs, tmp_path):
    model, x = made()
    for name in ("golden", "mine"):
        with ld.dump(model, name=name, mode="module+api"):
            model(x)
        ld.export_dump(name, tmp_path / name, layout="msprobe")
        with torch.no_grad():
            model.fc2.bias.add_(1)
    same = _compared(tmp_path / "golden", tmp_path / "golden", tmp_path / "same")
    assert {row["MaxAbsErr"] for row in same} == {"0.0"}
    assert {row["Result"] for row in same} == {"pass"}
    stacks = {row["NPU Name"]: row["NPU_Stack_Info"] for row in same}
    for call in ("Module.fc1.Linear.forward.0.input.0", "Functional.linear.0.forward.input.0"):
        assert "return self.fc2(self.act(self.fc1(x)))" in stacks[call]

    rows = _compared(tmp_path / "golden", tmp_path / "mine", tmp_path / "other")
    errors = {row["NPU Name"]: float(row["MaxAbsErr"]) for row in rows}
    assert errors["Module.fc2.Linear.forward.0.output.0"] == pytest.approx(1, rel=1e-5)
    assert errors["Module.fc1.Linear.forward.0.output.0"] == 0

    mixed = _compared(theirs / "step0", tmp_path / "golden", tmp_path / "mixed")
    figures = {row["NPU Name"]: row["MaxAbsErr"] for row in mixed}
    for module in ("fc1.Linear", "act.ReLU", "fc2.Linear"):
        assert figures[f"Module.{module}.forward.0.output.0"] == "0.0"
