"""The quickstart notebook, run as `make demo` runs it, from a copy."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PLANTED = "model.layers.2.mlp.act_fn"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # it trains a model


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_runner", NOTEBOOKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    for name in ("quickstart.ipynb", "tiny_text.txt"):
        shutil.copy(NOTEBOOKS / name, folder)
    return folder


@pytest.fixture(scope="module")
def executed(runner: ModuleType, place: Path) -> dict[str, str]:
    """The printed text of each cell, by cell id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLMDEBUG_RUNS", raising=False)
        patch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
        notebook = runner.execute(place / "quickstart.ipynb", quiet=True)
    return {cell.id: runner.printed(cell) for cell in notebook.cells if cell.cell_type == "code"}


def test_the_model_learns_its_text(executed: dict[str, str]) -> None:
    losses = [
        float(line.rsplit(" ", 1)[1]) for line in executed["train"].splitlines() if "loss" in line
    ]
    assert losses[0] > 4
    assert losses[-1] < 0.5
    assert "compared two runs of the model." in executed["load"]


def test_the_verdict_blames_the_planted_module(executed: dict[str, str]) -> None:
    assert executed["compare"].startswith("golden against mine: diverged. Made in activations.py:")
    assert f"{PLANTED} (GELUTanh, was SiLUActivation)" in executed["compare"].partition("\n")[0]
    assert f"First to diverge: {PLANTED} output[0] step 0" in executed["compare"]
    assert executed["report"].startswith(f"diverged: {PLANTED} (")  # findings[0]
    assert "its input tensors are identical" in executed["report"]


def test_the_repaired_port_matches(executed: dict[str, str]) -> None:
    says = "golden against fixed: match, but on only 4 of golden's 150 calls\n"
    assert executed["fix"].startswith(says)


def test_the_report_is_one_page_that_loads_nothing(executed: dict[str, str], place: Path) -> None:
    page = (place / "quickstart_report.html").read_text(encoding="utf-8")
    assert PLANTED in page
    assert "http://" not in page
    assert "https://" not in page


def test_runs_go_beside_the_notebook(executed: dict[str, str], place: Path) -> None:
    assert {folder.name for folder in (place / "llmdebug_runs").iterdir()} == {
        "golden",
        "mine",
        "fixed",
    }
    assert [line.split()[0] for line in executed["runs"].splitlines()] == ["name", "golden", "mine"]


def test_a_failing_cell_is_shown_and_fails_the_run(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in ("print('before')", "int('no number')", "print('after')")
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "broken.ipynb")
    assert runner.main([str(tmp_path / "broken.ipynb")]) == 1
    printed = capsys.readouterr()
    assert "[ 2/3] int('no number')" in printed.out
    assert "[ 3/3]" not in printed.out
    assert "ValueError" in printed.err
    assert "int('no number')" in printed.err


def test_it_is_committed_clean(runner: ModuleType) -> None:
    notebook: Any = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in codes)
    assert sys.getsizeof(nbformat.writes(notebook)) < 40_000
