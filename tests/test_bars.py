"""Progress appears when work lasts, says what is going on, and leaves nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from playwright.sync_api import Page, expect

import llmdebug_nb
from lab_server import Lab
from llmdebug_nb.core import bars
from llmdebug_nb.core.bars import Stages, progress_bar

LOAD = "import os; os.environ.pop('TQDM_DISABLE', None)\n%load_ext llmdebug_nb"
LASTING = """\
import os, time
from llmdebug_nb.core.bars import Stages, progress_bar
with Stages("pairing") as stages:
    for each in stages.over(["a", "b"], "comparing <all>", "pair"):
        while each == "b" and not os.path.exists("{}"): time.sleep(0.05)
print("done")"""
SAVED = "() => window.jupyterapp.commands.execute('docmanager:save')"
INTERRUPT = "() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')"


class _Bar:
    """Notes what tqdm would draw, and says when it did."""

    made: list[_Bar]
    disable = False

    def __init__(self, items: object = None, *, desc: str, **how: object) -> None:
        self.desc, self.how, self.drawn, self.closed = desc, how, [], False
        self.n, self.total = 0, None
        _Bar.made.append(self)

    def set_description_str(self, desc: str) -> None:
        self.drawn.append((desc, self.n, self.total))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(_Bar, "made", [], raising=False)
    bars.use(_Bar)
    yield _Bar.made
    bars.use(None)


def _until(holds) -> None:
    waiting = threading.Event()
    while not holds():
        waiting.wait(0.02)


def test_a_stage_that_lasts_is_drawn_with_its_count_and_the_next_one_after_it(made):
    with Stages("pairing") as stages:
        _until(lambda: made and made[0].drawn)
        for _ in stages.over("ab", "comparing", "pair"):
            _until(lambda: made[0].drawn[-1] == ("comparing", stages._done, 2))
        stages.stage("judging")
        _until(lambda: made[0].drawn[-1] == ("judging", 0, None))
    (bar,) = made
    assert bar.drawn[0] == ("pairing", 0, None)
    assert bar.closed


def test_what_is_known_by_now_stands_before_each_stage(made):
    with Stages("pairing") as stages:
        stages.say("Step 0: diverged")
        stages.stage("judging")
        _until(lambda: made and made[0].drawn[-1:] == [("Step 0: diverged … judging", 0, None)])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_or_an_error_takes_the_bar_away(made, error):
    threads = set(threading.enumerate())
    with pytest.raises(error), Stages("pairing"):  # noqa: PT012 - the block waits first
        _until(lambda: made)
        raise error
    assert made[0].closed
    assert set(threading.enumerate()) <= threads  # those of other tests may end


def test_one_bar_is_shown_for_work_inside_work(made):
    with Stages("opening") as outer:
        with Stages("pairing") as inner:
            assert inner is outer
            _until(lambda: made and made[0].drawn[-1:] == [("pairing", 0, None)])
        assert not made[0].closed
    assert len(made) == 1


def test_what_is_not_to_be_shown_is_not_and_hides_no_other(made):
    with Stages("hidden", shown=False), Stages("shown"):
        _until(lambda: made)
    assert [bar.desc for bar in made] == ["shown"]
    assert progress_bar([1], desc="x", unit="y", shown=False).how["disable"] is True


def test_every_bar_is_of_this_module():
    package = Path(llmdebug_nb.__file__).parent
    using = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "import tqdm" in file.read_text(encoding="utf-8")
    ]
    assert sorted(using) == ["core/bars.py", "notebook/cell_bar.py", "notebook/formatters.py",
                             "store/figures.py"]  # fmt: skip  # the last two only name its type


def test_a_saved_notebook_has_no_bar_and_no_widget_of_one(tmp_path):
    (tmp_path / "go").touch()
    cells = [
        LOAD,
        LASTING.format(tmp_path / "go"),
        "for _ in progress_bar([1, 2], desc='reading', unit='file', delay=0): pass",
        "for _ in progress_bar([1, 2], desc='reading', unit='file', delay=0): 1 / 0",
    ]
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    made[-1].metadata.tags = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=made)
    NotebookClient(notebook, kernel_name="python3").execute()
    nbformat.validate(notebook)
    assert "widget-view" not in nbformat.writes(notebook)
    shown = [[o for o in cell.outputs if o.output_type == "display_data"] for cell in made[1:]]
    assert all(one.data == {} for outputs in shown for one in outputs)
    assert len(shown[1]) == len(shown[2]) == 1  # they were drawn


def test_in_jupyterlab_progress_is_seen_and_gone_from_the_saved_notebook(
    lab: Lab, page: Page
) -> None:
    name = lab.write_notebook(
        "progress.ipynb", LOAD, LASTING.format("seen"), LASTING.format("never")
    )
    lab.open(page, name)
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    lab.run_cell(page, 0)
    lab.run_cell(page, 1)
    bar = cells.nth(1).get_by_role("progressbar")
    expect(bar).to_have_attribute("max", "2", timeout=60_000)
    expect(cells.nth(1)).to_contain_text("comparing <all>: 50 % of 2 pairs")
    (lab.root / "seen").touch()
    expect(cells.nth(1).locator(".jp-OutputArea")).to_contain_text("done")
    expect(bar).to_have_count(0)

    lab.run_cell(page, 2)
    expect(cells.nth(2).get_by_role("progressbar")).to_be_visible(timeout=60_000)
    page.evaluate(INTERRUPT)
    expect(cells.nth(2).locator(".jp-OutputArea")).to_contain_text("KeyboardInterrupt")
    expect(cells.nth(2).get_by_role("progressbar")).to_have_count(0)

    page.evaluate(SAVED)
    saved = nbformat.read(lab.root / name, 4)
    shown = [o for c in saved.cells for o in c.outputs if o.output_type == "display_data"]
    assert [one.data for one in shown] == [{}, {}]
    page.reload()
    expect(cells.nth(1).locator(".jp-OutputArea").first).to_contain_text("done", timeout=60_000)
    expect(page.locator(".jp-Notebook")).not_to_contain_text("Error displaying")
    assert cells.nth(1).locator(".jp-OutputArea-child:visible").count() == 1
