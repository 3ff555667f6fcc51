"""Code beside code: golden's function and mine's, line by line, around the line to blame."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.source.listings import Listing
from llmdebug_nb.source.side_by_side import aligned
from recordings import change_index

GOLDEN = '''\
import torch
from torch import nn


def scaled(x):
    return torch.mul(x, 0.5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        """Return what a block returns."""
        hidden = self.up(x)
        hidden = torch.tanh(hidden)
        hidden = scaled(hidden)
        out = self.down(hidden)
        return torch.add(out, x)
'''
MINE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.up(x)
        h = torch.tanh(h)
        h = torch.mul(h, 0.25)  # the bug
        y = self.down(h)
        return torch.add(y, x)
"""


def block(folder: Path, name: str, text: str) -> nn.Module:
    """Return the block of a program that is written to a file."""
    file = folder / f"{name}.py"
    file.write_text(text)
    linecache.checkcache(str(file))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Block()


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return a function that records golden and mine, and gives the paths of both runs."""
    monkeypatch.chdir(tmp_path)
    yield lambda mine=MINE, golden=GOLDEN, **options: [
        recorded(block(tmp_path, f"listed_{name}", text), name, **options)
        for name, text in (("golden", golden), ("mine", mine))
    ]
    for name in ("listed_golden", "listed_mine"):
        sys.modules.pop(name, None)


def recorded(model: nn.Module, name: str, mode: str = "module+api", **options) -> Path:
    with ld.dump(model, name=name, mode=mode, **options) as run, torch.no_grad():
        model(torch.linspace(-1, 1, 24).reshape(3, 8))
    return run.path


def listed(paths: list[Path]) -> Listing:
    report = ld.compare(*paths, progress=False)
    return report.listing(report.findings[0])


def states(listing: Listing) -> dict[str, str]:
    return {line.mine.strip(): line.state for line in listing.lines if line.state}


def beside(listing: Listing) -> dict[str, str]:
    return {
        line.mine.strip(): line.golden.strip()
        for line in listing.lines
        if line.mine_line and line.golden_line
    }


EXPECTED = {
    "h = self.up(x)": "equal",
    "h = torch.tanh(h)": "equal",
    "h = torch.mul(h, 0.25)  # the bug": "guilty",
    "y = self.down(h)": "inherited",
    "return torch.add(y, x)": "inherited",
}


def test_the_line_to_blame_is_marked_with_equal_lines_before_and_inherited_ones_behind(runs):
    listing = listed(runs())
    assert (listing.golden_file, listing.golden_function) == ("listed_golden.py", "Block.forward")
    assert (listing.mine_file, listing.mine_function) == ("listed_mine.py", "Block.forward")
    assert states(listing) == EXPECTED
    assert listing.lines[listing.at].mine == "    h = torch.mul(h, 0.25)  # the bug"
    assert (
        listing.lines[listing.at].mine_line
        == MINE.splitlines().index("        h = torch.mul(h, 0.25)  # the bug") + 1
    )
    assert listing.lines[listing.at].error == pytest.approx(0.5)  # 0.25 h for 0.5 h
    assert listing.note == ""


def test_lines_that_compute_the_same_stand_side_by_side(runs):
    assert beside(listed(runs())) == {
        "def forward(self, x):": "def forward(self, x):",
        "h = self.up(x)": "hidden = self.up(x)",
        "h = torch.tanh(h)": "hidden = torch.tanh(hidden)",
        "h = torch.mul(h, 0.25)  # the bug": "hidden = scaled(hidden)",
        "y = self.down(h)": "out = self.down(hidden)",
        "return torch.add(y, x)": "return torch.add(out, x)",
    }


def test_a_line_that_mine_leaves_out_is_shown_beside_where_it_would_stand(runs):
    listing = listed(runs(MINE.replace("        h = torch.mul(h, 0.25)  # the bug\n", "")))
    assert listing.mine_function == "Block.forward"
    assert listing.golden_function == "Block.forward"
    blamed = listing.lines[listing.at]
    assert blamed.state == "guilty" or blamed.golden.strip() == "hidden = scaled(hidden)"
    assert states(listing)["h = self.up(x)"] == "equal"
    assert states(listing)["return torch.add(y, x)"] == "inherited"


LAYERS = """import torch
from torch import nn


def layer(x, weight, n):
    y = torch.nn.functional.linear(x, weight)
    y = torch.tanh(y)
    y = torch.mul(y, 0.5)
    return torch.add(x, y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8) / 3)

    def forward(self, x):
        for n in range(3):
            x = layer(x, self.weights[n], n)
        return x
"""


def test_of_a_function_that_runs_for_each_layer_the_run_with_the_bug_is_shown(runs):
    mine = LAYERS.replace("torch.mul(y, 0.5)", "torch.mul(y, 0.5 if n != 1 else 0.25)")
    assert states(listed(runs(mine, LAYERS))) == {
        "y = torch.nn.functional.linear(x, weight)": "equal",
        "y = torch.tanh(y)": "equal",
        "y = torch.mul(y, 0.5 if n != 1 else 0.25)": "guilty",
        "return torch.add(x, y)": "inherited",
    }


SPLIT = GOLDEN.replace(
    "        hidden = torch.tanh(hidden)\n        hidden = scaled(hidden)\n",
    "        hidden = act(\n            hidden,\n        )\n",
).replace(
    "class Block",
    """def act(x):
    \"\"\"Return the hidden values.\"\"\"
    x = torch.tanh(x)
    return scaled(x)


class Block""",
)


def test_lines_of_goldens_helper_stand_where_it_is_called_if_several_of_mine_answer_to_them(runs):
    listing = listed(runs(golden=SPLIT))
    assert listing.golden_function == "Block.forward"
    assert beside(listing)["h = torch.tanh(h)"] == "x = torch.tanh(x)"
    assert beside(listing)["h = torch.mul(h, 0.25)  # the bug"] == "return scaled(x)"
    golden = [line.golden for line in listing.lines if line.golden_line]
    at = golden.index("    )")
    assert golden[at - 2 : at + 3] == [
        "    hidden = act(",
        "        hidden,",
        "    )",
        "        x = torch.tanh(x)",
        "        return scaled(x)",
    ]
    numbers = {line.golden: line.golden_line for line in listing.lines}
    written = [line.strip() for line in SPLIT.splitlines()]
    assert numbers["        x = torch.tanh(x)"] == written.index("x = torch.tanh(x)") + 1
    assert listing.note == "golden: lines of act stand where they are called"


def test_every_line_of_both_functions_is_listed_once_and_in_order(runs):
    listing = listed(runs())
    golden = [line.golden_line for line in listing.lines if line.golden_line]
    mine = [line.mine_line for line in listing.lines if line.mine_line]
    assert golden == [*range(14, 21)]
    assert mine == [*range(10, 16)]


def test_the_code_is_there_where_the_files_are_gone(runs, tmp_path, monkeypatch):
    paths = runs()
    before = listed(paths)
    for name in ("golden", "mine"):
        (tmp_path / f"listed_{name}.py").unlink()
    linecache.clearcache()
    monkeypatch.chdir("/")
    assert listed(paths) == before
    assert states(before) == EXPECTED


def drop_functions(path: Path) -> None:
    change_index(path, "DROP TABLE functions")


def test_an_older_dump_shows_the_file_of_today_if_the_line_is_as_it_was(runs):
    paths = runs()
    for path in paths:
        drop_functions(path)
    listing = listed(paths)
    assert states(listing) == EXPECTED
    assert "as it is now" in listing.note


def test_an_older_dump_without_its_files_shows_the_recorded_lines(runs, tmp_path):
    paths = runs()
    for path in paths:
        drop_functions(path)
    for name in ("golden", "mine"):
        (tmp_path / f"listed_{name}.py").write_text("changed\n" * 40)
    linecache.checkcache()
    listing = listed(paths)
    assert states(listing) == EXPECTED
    assert "def forward(self, x):" not in beside(listing)
    assert "only the lines of recorded operators are known" in listing.note


def test_modules_alone_have_the_states_of_the_modules_that_a_line_calls(runs):
    listing = listed(runs(mode="module"))
    assert states(listing) == {"h = self.up(x)": "equal", "y = self.down(h)": "inherited"}
    assert beside(listing)["y = self.down(h)"] == "out = self.down(hidden)"


def test_a_module_of_torch_is_shown_where_it_is_called(runs, tmp_path):
    model = block(tmp_path, "listed_golden", GOLDEN)
    golden = recorded(model, "golden", mode="module", weights=True)
    with torch.no_grad():
        model.down.weight[0] += 1
    listing = listed([golden, recorded(model, "mine", mode="module", weights=True)])
    assert listing.mine_function == "Block.forward"
    assert listing.lines[listing.at].mine.strip() == "out = self.down(hidden)"
    assert listing.lines[listing.at].state == "guilty"


def test_a_side_without_sources_is_told_and_the_other_stands_alone(runs, tmp_path):
    paths = runs()
    bare = recorded(block(tmp_path, "listed_golden", GOLDEN), "bare", sources=False)
    (tmp_path / "listed_golden.py").unlink()
    linecache.clearcache()
    listing = listed([bare, paths[1]])
    assert listing.golden_file == listing.golden_function == ""
    assert not any(line.golden_line for line in listing.lines)
    assert states(listing) == EXPECTED
    assert listing.note.startswith("golden's code is not known")


def test_a_damaged_function_is_told_in_the_note(runs):
    paths = runs()
    change_index(paths[1], "UPDATE functions SET text = x'00ff'")
    listing = listed(paths)
    assert listing.lines == ()
    assert "damaged" in listing.note


def test_the_explorer_is_sent_the_listing_with_a_finding(runs):
    report = ld.compare(*runs(), progress=False)
    view = report.view().finding({"op": "finding", "finding": 0})["listing"]
    assert view["at"] == report.listing(report.findings[0]).at
    assert view["lines"][view["at"]]["state"] == "guilty"


# -- alignment ----------------------------------------------------------------------------------

TEXTS = st.lists(st.sampled_from(["", "x = a", "x = b", "    y = f(x)", "return x"]), max_size=12)


@given(TEXTS, TEXTS, st.data())
def test_alignment_keeps_every_line_once_and_in_order(golden, mine, data):
    places = st.tuples(
        st.integers(0, max(len(golden) - 1, 0)), st.integers(0, max(len(mine) - 1, 0))
    )
    some = st.dictionaries(places, st.integers(1, 9), max_size=6)
    anchors = data.draw(some) if golden and mine else {}
    rows = aligned(golden, mine, anchors)
    assert [g for g, _ in rows if g is not None] == [*range(len(golden))]
    assert [m for _, m in rows if m is not None] == [*range(len(mine))]
    assert all(row != (None, None) for row in rows)
    assert not anchors or any(row in anchors for row in rows)


@given(TEXTS)
def test_a_text_beside_itself_has_every_line_beside_itself(text):
    assert aligned(text, text, {}) == [(at, at) for at in range(len(text))]


def test_of_anchors_that_cross_those_of_most_values_count():
    rows = aligned(["a", "b"], ["c", "d"], {(0, 1): 1, (1, 0): 3})
    assert (1, 0) in rows
    assert (0, 1) not in rows
