"""What the explorers cost in a browser, beside other notebook widgets: two Markdown tables.

    python benchmarks/ui.py [--rounds 3] [--only run report tensor rivals]

Headless Chromium in a real JupyterLab on loopback, with a real kernel. A run and a comparison of
100,000 sites, and a tensor of 4096 x 4096, are written first (`large.py`). A time ends when the
result is on the page and two more frames were painted, some 30 ms. "first paint" begins with the
cell that shows an opened dump. Each figure is the median over the rounds, each with a page and a
kernel of its own.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE)]

import large  # noqa: E402

from browser import launch_args  # noqa: E402
from lab_server import Lab, running_lab  # noqa: E402
from llmdebug_nb.show.bundle import WIDGET  # noqa: E402

LIMIT_MS = 120_000
# does `act` and returns the milliseconds until `done` holds and has been painted, or null
UNTIL = """async ([act, done, limit]) => {
  const frame = () => new Promise(requestAnimationFrame);
  const run = new Function(act), ready = new Function('return ' + done);
  const start = performance.now();
  run();
  while (!ready()) {
    if (performance.now() - start > limit) return null;
    await frame();
  }
  await frame();
  await frame();
  return performance.now() - start;
}"""
# scrolls by 60 pixels a frame for two seconds
SCROLL = """async selector => {
  const list = document.querySelector(selector), frame = () => new Promise(requestAnimationFrame);
  const start = await frame();
  let now = start, frames = 0;
  for (; now - start < 2000; frames++) {
    list.scrollTop += 60;
    now = await frame();
  }
  return frames / (now - start) * 1000;
}"""
Measure = Callable[[Page], "float | None"]


class Figure(NamedTuple):
    """A line of the table: None or nothing to target prints as –."""

    name: str
    unit: str
    target: str
    measure: Measure


class Case(NamedTuple):
    """``setup`` is run before the clock starts, ``show`` by the first figure."""

    setup: str
    show: str
    figures: tuple[Figure, ...]


def until(act: str, done: str, limit: int = LIMIT_MS) -> Measure:
    return lambda page: page.evaluate(UNTIL, [act, done, limit])


def shown(done: str) -> Measure:
    return until("window.jupyterapp.commands.execute('notebook:run-cell')", done)


def clicked(selector: str, done: str) -> Measure:
    """From the click to the page as it is ``done``; what to click on is waited for before.

    The page then finds it as ``target``.
    """
    act = f"""const target = window.target = document.querySelector(`{selector}`);
      const box = target.getBoundingClientRect();
      const x = box.x + box.width / 2, y = box.y + box.height / 2;
      target.dispatchEvent(new MouseEvent('click', {{bubbles: true, clientX: x, clientY: y}}))"""

    def measure(page: Page) -> float | None:
        page.locator(selector).first.wait_for()
        return until(act, done)(page)

    return measure


# -- the explorers --------------------------------------------------------------------------------

GRID = ".llmdebug-rows [role=grid]"
ERROR = "[data-mime-type='application/vnd.jupyter.stderr'], .jp-RenderedError"
LISTED = "document.querySelectorAll('.llmdebug-record[data-row]').length > 5"
TOTAL = "document.querySelector('.llmdebug-total').textContent"
# the answer, the cells and the calls of a layer are there
ANSWERED = (
    "document.querySelector('.llmdebug-answer h2') && document.querySelector('.llmdebug-call')"
)
CALL = ".llmdebug-call:not([aria-current])"
DRAWN = "document.querySelector('.llmdebug-canvas[aria-busy=false]')?.ariaLabel"


def opened(level: int) -> Measure:
    item = ".llmdebug-tree [role=treeitem][aria-level='{}']"
    return clicked(
        f"{item.format(level)} .llmdebug-chevron",
        f"document.querySelector(`{item.format(level + 1)}`)",
    )


def typed(text: str) -> Measure:
    """From the last key to the list of what passes; the page waits 200 ms for further keys."""
    act = f"""window.before = {TOTAL};
      const box = document.querySelector('.llmdebug-filter');
      box.value = '{text}';
      box.dispatchEvent(new Event('input'))"""
    return until(act, f"{TOTAL} !== window.before && {LISTED}")


def zoomed(key: str) -> Measure:
    act = f"""const map = document.querySelector('.llmdebug-canvas');
      window.before = map.ariaLabel;
      map.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))"""
    return until(act, f"{DRAWN} && {DRAWN} !== window.before")


def sorted_by(column: str) -> Measure:
    heads = f"[...document.querySelectorAll('{GRID} [role=columnheader]')]"
    head = f"{heads}.find(one => one.textContent.startsWith('{column}'))"
    first = "document.querySelector('.llmdebug-record[aria-rowindex=\"2\"]')?.dataset.row"
    act = f"window.before = {first}; ({head}.querySelector('button') ?? {head}).click()"
    return until(
        act, f"/ing$/.test({head}.ariaSort) && {first} && {first} !== window.before", 5_000
    )


def frame_work(page: Page) -> float:
    """Return the CPU time of the page's thread for a frame of scrolling."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def worked() -> float:
        found = session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in found if metric["name"] == "TaskDuration")

    before = worked()
    frames = 2 * page.evaluate(SCROLL, GRID)
    return (worked() - before) / frames * 1000


LIST = (
    Figure("scrolling the list", "frames/s", "≥ 50", lambda page: page.evaluate(SCROLL, GRID)),
    Figure("work of the page for a frame of that", "ms", "≤ 20", frame_work),
    Figure(
        "elements after that",
        "",
        "",
        lambda page: page.evaluate("document.querySelectorAll('.llmdebug *').length"),
    ),
)
FILTERS = (
    Figure("filter by a word", "ms", "", typed("block7")),
    Figure("filter by two words and a figure", "ms", "", typed("softmax part13 abs>1")),
)
OPEN = """\
import llmdebug_nb as ld, llmdebug_nb.notebook.widgets
run = ld.open_run('{}'); len(run)"""
EXPLORERS = {
    "run": Case(
        OPEN.format("golden"),
        "ld.explore(run)",
        (
            Figure("first paint", "ms", "≤ 500", shown(LISTED)),
            Figure(
                "model tree, after that",
                "ms",
                "",
                until("", "document.querySelector('.llmdebug-tree [aria-level=\\'2\\']')"),
            ),
            Figure("open a module with 100 children", "ms", "≤ 60", opened(2)),
            Figure("open one of them", "ms", "≤ 60", opened(3)),
            *LIST,
            *FILTERS,
        ),
    ),
    "report": Case(
        "import llmdebug_nb as ld, large, llmdebug_nb.notebook.widgets\n"
        "report = large.report(ld.open_run('golden'), ld.open_run('mine'))\n"
        "len(report.differences)",
        "ld.explore(report)",
        (
            Figure("first paint", "ms", "≤ 500", shown(ANSWERED)),
            Figure(
                "select another call",
                "ms",
                "≤ 80",
                clicked(CALL, "target.hasAttribute('aria-current')"),
            ),
            Figure("open the drawer", "ms", "", clicked(".llmdebug-open", LISTED)),
            *LIST,
            Figure("sort by error", "ms", "≤ 400", sorted_by("error")),
            *FILTERS,
        ),
    ),
    "tensor": Case(
        OPEN.format("tensor"),
        "explorer = ld.explore(run); explorer.selected = 0; explorer",
        (
            Figure("first paint", "ms", "≤ 400", shown(DRAWN)),
            Figure("zoom in", "ms", "≤ 60", zoomed("+")),
            Figure("zoom in further", "ms", "≤ 60", zoomed("+")),
            Figure("zoom out", "ms", "≤ 60", zoomed("-")),
            Figure("back to the whole", "ms", "≤ 60", zoomed("0")),
        ),
    ),
}

# -- other ways to show as much -------------------------------------------------------------------

TREE = """\
import ipywidgets as widgets
def boxes(n, make):
    titles = [f"module {i}" for i in range(n)]
    parts = widgets.Accordion([widgets.VBox() for _ in range(n)], titles=titles)
    def fill(change):
        if change["new"] is not None and not parts.children[change["new"]].children:
            parts.children[change["new"]].children = [make()]
    parts.observe(fill, "selected_index")
    return parts
def leaves(n): return widgets.VBox([widgets.Label(f"op {i} max_abs=1.2e-3") for i in range(n)])
0"""
FRAME = """\
import numpy as np, pandas as pd
random = np.random.default_rng(0)
frame = pd.DataFrame({"op": [f"layers.{i % 80}.op{i}" for i in range(100_000)]})
for name in "abcdefg": frame[name] = random.lognormal(-8, 3, 100_000)
len(frame)"""
ARRAY = """\
%matplotlib inline
import numpy as np, matplotlib.pyplot as plt
values = np.random.default_rng(0).standard_normal((4096, 4096), dtype=np.float32)
plt.close(plt.figure()); 0"""
HEADER = ".jp-OutputArea .jupyter-widget-Collapse-header"
PICTURE = "document.querySelector('.jp-OutputArea img')"
DATAGRID = "document.querySelector('.ipydatagrid-widget canvas')"
EMPTY = "[...document.querySelectorAll('.jp-OutputArea-output')]"
TABLE = "document.querySelectorAll('.jp-OutputArea tbody tr').length > 4"


def unfolded(n: int, done: str) -> tuple[Figure, ...]:
    return (
        Figure(
            "first paint", "ms", "", shown(f"document.querySelectorAll('{HEADER}').length >= {n}")
        ),
        Figure("open a module", "ms", "", clicked(HEADER, done)),
    )


def painted(done: str) -> tuple[Figure, ...]:
    return (Figure("first paint", "ms", "", shown(done)),)


CHILDREN = f"document.querySelectorAll('{HEADER}').length >= 200"
# by what they need: those that aren't installed are left out
RIVALS: dict[str, tuple[str, Case]] = {
    "a widget with nothing in it (floor)": (
        "anywidget",
        Case(
            "import anywidget\nclass Empty(anywidget.AnyWidget):\n"
            "    _esm = \"export default {render: ({el}) => { el.textContent = 'nothing' }}\"\n0",
            "Empty()",
            painted(f"{EMPTY}.some(one => one.textContent === 'nothing')"),
        ),
    ),
    "ipywidgets Accordion, 1,000 leaves at once": (
        "ipywidgets",
        Case(
            TREE + "\nnames = [str(i) for i in range(100)]; 0",
            "widgets.Accordion([leaves(10) for _ in range(100)], titles=names)",
            unfolded(100, "document.querySelector('.jupyter-widget-Collapse-open')"),
        ),
    ),
    "ipywidgets Accordion, 100,000 leaves on demand": (
        "ipywidgets",
        Case(TREE, "boxes(100, lambda: boxes(100, lambda: leaves(10)))", unfolded(100, CHILDREN)),
    ),
    "ipytree, 1,000 leaves": (
        "ipytree",
        Case(
            "from ipytree import Node, Tree\n"
            "def leaves(): return [Node(str(i)) for i in range(10)]\n0",
            "Tree([Node(str(i), leaves(), opened=False) for i in range(100)])",
            painted("document.querySelectorAll('.jp-OutputArea .jstree-node').length >= 100"),
        ),
    ),
    "pandas, 100,000 x 8 shortened to 10 rows": ("pandas", Case(FRAME, "frame", painted(TABLE))),
    "itables, 100,000 x 8 whole": (
        "itables",
        Case(
            FRAME + "\nimport itables; 0",
            "itables.show(frame, maxBytes=0, connected=False)",
            painted(TABLE),
        ),
    ),
    "ipydatagrid, 100,000 x 8": (
        "ipydatagrid",
        Case(FRAME + "\nimport ipydatagrid; 0", "ipydatagrid.DataGrid(frame)", painted(DATAGRID)),
    ),
    "matplotlib imshow, 4096 x 4096": (
        "matplotlib",
        Case(ARRAY, "plt.imshow(values, cmap='RdBu'); plt.show()", painted(PICTURE)),
    ),
}

# -- measuring ------------------------------------------------------------------------------------


def measured(lab: Lab, browser: Browser, case: Case) -> list[float | None]:
    """Return a round's figures, and the kB over the web socket since the clock started."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(LIMIT_MS + 10_000)
    received: list[int] = []
    page.on(
        "websocket",
        lambda socket: socket.on("framereceived", lambda data: received.append(len(data))),
    )
    try:
        lab.open(page, lab.write_notebook("case.ipynb", case.setup, case.show))
        lab.run_cell(page)
        page.locator(".jp-CodeCell .jp-OutputArea-output").first.wait_for()
        page.wait_for_timeout(500)
        if (failed := page.locator(ERROR)).count():
            raise SystemExit(f"the setup failed:\n{failed.inner_text()}")
        received.clear()
        figures = [figure.measure(page) for figure in case.figures[:1]]
        page.wait_for_timeout(500)
        nbytes = sum(received) / 1000
        return [*figures, *(figure.measure(page) for figure in case.figures[1:]), nbytes]
    finally:
        page.close()
        lab.shut_down("notebook")


def medians(lab: Lab, browser: Browser, case: Case, rounds: int) -> list[float | None]:
    columns = zip(*(measured(lab, browser, case) for _ in range(rounds)), strict=True)
    return [None if None in column else statistics.median(column) for column in columns]


def line(*cells: str) -> None:
    print(f"|{'|'.join(cells)}|", flush=True)


def head(*cells: str) -> None:
    line(*cells)
    line(*["---"] * len(cells))


def text(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.0f} {unit}".strip()


def explorers(lab: Lab, browser: Browser, names: Iterable[str], rounds: int) -> None:
    head("explorer", "what", "measured", "target")
    for name in names:
        case = EXPLORERS[name]
        *found, nbytes = medians(lab, browser, case, rounds)
        for figure, value in zip(case.figures, found, strict=True):
            line(name, figure.name, text(value, figure.unit), figure.target)
        line(
            name,
            "over the web socket for the first paint",
            text(nbytes, "kB"),
            "≤ 2,000 kB" if name == "tensor" else "",
        )
    line(
        "all",
        "widget bundle, gzipped",
        f"{len(gzip.compress(WIDGET.read_bytes())) / 1000:.1f} kB",
        "≤ 60 kB",
    )


def rivals(lab: Lab, browser: Browser, rounds: int) -> None:
    print()
    head("shown otherwise", "first paint", "open a module", "over the web socket")
    for name, (package, case) in RIVALS.items():
        if importlib.util.find_spec(package) is None:
            line(name, f"{package} is not installed", "", "")
            continue
        first, *others, nbytes = medians(lab, browser, case, rounds)
        line(name, text(first, "ms"), text(others[0], "ms") if others else "", text(nbytes, "kB"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=[*EXPLORERS, "rivals"], default=[*EXPLORERS, "rivals"]
    )
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(Path(folder)) as lab,
        sync_playwright() as playwright,
    ):
        runs = lab.root / "llmdebug_runs"
        large.sites(runs, "golden")
        large.sites(runs, "mine", error=0.01)
        large.tensor(runs, "tensor")
        browser = playwright.chromium.launch(**launch_args({}))
        load = os.getloadavg()[0]
        machine = f"{os.cpu_count()} cores, load average {load:.1f} before"
        print(f"Chromium {browser.version}, {machine}; median of {given.rounds} rounds\n")
        explorers(lab, browser, [name for name in EXPLORERS if name in given.only], given.rounds)
        if "rivals" in given.only:
            rivals(lab, browser, given.rounds)
        browser.close()


if __name__ == "__main__":
    main()
