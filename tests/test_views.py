"""What the explorer is told, for a real run and a real report."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import llmdebug_nb as ld
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.show import tensors
from llmdebug_nb.show.run_view import RunView
from models import generate, llama, prompt

BROKEN = "model.layers.1.mlp.act_fn"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    model = llama()
    broken = copy.deepcopy(model)
    broken.get_submodule(BROKEN).register_forward_hook(lambda module, args, out: out * 1.01)
    found = []
    for name, each in (("golden", model), ("mine", broken)):
        with ld.dump(each, name=name, tokens="0-2", path=tmp_path_factory.mktemp(name)) as run:
            each(prompt())
            generate(each, new=4)
        found.append(run)
    return found


@pytest.fixture(scope="module", params=["run", "report"])
def view(request, runs):
    return RunView(runs[0]) if request.param == "run" else ld.compare(*runs).view()


@pytest.fixture
def ask(view):
    """Ask through the bridge, as the page does: requests are validated, answers are JSON."""
    bridge = Bridge(view)

    def send(op, **request):
        answer, buffers = bridge.answer({"op": op, "re": 1, **request})
        assert "error" not in answer, answer
        json.dumps(answer, allow_nan=False)
        return (answer, buffers) if buffers else answer

    return send


def _rows(ask, **changes):
    return ask("rows", **{"step": -1, "node": -1, "mismatch": False, "text": "", "start": 0, "n": 1000, **changes})


def test_the_overview_marks_warm_ups_and_counts_rows(ask, runs):
    overview = ask("overview")
    assert [s["label"] for s in overview["steps"]] == ["warmup -1", "0 prefill", "1 decode", "2 decode"]
    assert sum(s["rows"] for s in overview["steps"]) == overview["rows"] == len(runs[0])


def test_the_tree_unfolds_to_every_module_and_rolls_counts_up(ask, runs):
    def walk(parent):
        for node in ask("children", parent=parent, start=0, n=1000)["nodes"]:
            yield node
            yield from walk(node["id"])

    nodes = list(walk(-1))
    assert [n["path"] for n in nodes] == [n.path for n in runs[0].nodes]
    frame = runs[0].to_pandas()
    for node in nodes:
        inside = frame.path.eq(node["path"]) | frame.path.str.startswith(node["path"] + "." if node["path"] else "")
        assert node["rows"] == inside.sum(), node["path"]
    assert ask("path", path=BROKEN)["ids"] == [
        next(n["id"] for n in nodes if n["path"] == p)
        for p in ("", "model", "model.layers", "model.layers.1", "model.layers.1.mlp", BROKEN)
    ]
    assert ask("children", parent=0, start=1, n=1)["total"] == 2


def test_rows_come_by_step_node_text_and_page_in_execution_order(ask):
    everything = _rows(ask)
    ids = [row["id"] for row in everything["rows"]]
    assert ids == sorted(ids)
    assert everything["total"] == len(ids)
    part = _rows(ask, start=10, n=5)
    assert [row["id"] for row in part["rows"]] == ids[10:15]
    step = _rows(ask, step=1)
    assert {row["step"] for row in step["rows"]} == {1}
    node = ask("path", path="model.layers.1")["ids"][-1]
    assert all(row["path"].startswith("model.layers.1") for row in _rows(ask, node=node)["rows"])
    assert {row["path"] for row in _rows(ask, text="1.mlp.act_")["rows"]} == {BROKEN}
    assert _rows(ask, text="%")["total"] == 0
    filtered = _rows(ask, text="mlp.down_proj out[")["rows"]
    assert {(row["path"].rpartition(".")[2], row["role"]) for row in filtered} == {("down_proj", "output")}


def test_next_and_previous_walk_the_whole_list_there_and_back(ask):
    ids = [row["id"] for row in _rows(ask)["rows"]]
    seen, row = [], -1
    while True:
        found = ask("locate", row=row, delta=1, node=-1, mismatch=False, text="")
        if found["row"] is None:
            break
        row = found["row"]["id"]
        seen.append(row)
        assert _rows(ask, step=found["row"]["step"])["rows"][found["index"]]["id"] == row
    assert seen == ids
    last = ask("locate", row=-1, delta=-1, node=-1, mismatch=False, text="")["row"]["id"]
    assert last == ids[-1]
    assert ask("locate", row=last, delta=-1, node=-1, mismatch=False, text="")["row"]["id"] == ids[-2]


def test_detail_names_axes_code_and_producer(ask, runs):
    row = next(
        r for r in _rows(ask, step=1)["rows"] if r["path"] == "model.layers.0.mlp.down_proj" and r["role"] == "input"
    )
    detail = ask("detail", row=row["id"])
    assert [axis["name"] for axis in detail["axes"]] == ["batch", "token", "feature"]
    code = detail["sides"][0]["code"]
    assert torch.equal(eval(code, {"golden": runs[0]}), runs[0].tensor("model.layers.0.mlp.down_proj", role="input"))
    norm = next(
        r for r in _rows(ask, step=1)["rows"] if r["path"] == "model.layers.0.input_layernorm" and r["role"] == "input"
    )
    detail = ask("detail", row=norm["id"])
    assert detail["producer_label"].startswith("model.embed_tokens output[0]")
    assert ask("row", row=detail["producer"], node=-1, mismatch=False, text="")["row"]["path"] == "model.embed_tokens"


def test_a_window_holds_the_values_themselves_when_it_is_small(ask, runs):
    row = next(r for r in _rows(ask, step=1)["rows"] if r["path"] == "lm_head" and r["role"] == "output")
    view, (buffer,) = ask(
        "view", row=row["id"], which="golden", axes=[1, 2], fixed=[0, 0, 0], y0=0, x0=4, y1=1, x1=9, size=64
    )
    assert (view["h"], view["w"], view["fy"], view["fx"], view["rows"], view["cols"]) == (1, 5, 1, 1, 1, 96)
    got = np.frombuffer(buffer, "<f4")
    assert np.array_equal(got, runs[0].tensor("lm_head", as_numpy=True)[0, 0, 4:9])
    counts = ask("histogram", row=row["id"], which="golden", bins=10)
    assert sum(counts["counts"]) == counts["total"] == 96


@pytest.mark.parametrize(
    ("op", "request_", "says"),
    [
        ("detail", {"row": 1 << 50}, "no"),
        ("children", {"parent": 0, "start": 0, "n": "x"}, "must be int"),
        ("rows", {"step": -1, "node": 1 << 40, "mismatch": False, "text": "", "start": 0, "n": 9}, "no node"),
        (
            "view",
            {"row": 5, "which": "golden", "axes": [7, 8], "fixed": [], "y0": 0, "x0": 0, "y1": 0, "x1": 0, "size": 9},
            "axes",
        ),
        ("nosuch", {}, "unknown op"),
    ],
)
def test_requests_that_make_no_sense_are_answered_with_an_error(view, op, request_, says):
    answer, _ = Bridge(view).answer({"op": op, "re": 3, **request_})
    assert says in answer["error"]
    assert answer["re"] == 3


def test_a_report_leads_to_the_blamed_row_and_its_mismatches(runs):
    view = ld.compare(*runs).view()
    overview = view.overview()
    assert overview["verdict"] == "diverged"
    finding = overview["findings"][0]
    assert finding["path"] == BROKEN
    row = view.detail({"op": "detail", "row": finding["row"]})
    assert row["row"]["verdict"] == "diverged"
    assert [side["which"] for side in row["sides"]] == ["golden", "mine", "difference"]
    assert row["sides"][2]["l2norm"] == pytest.approx(
        next(m["value"] for m in row["metrics"] if m["name"] == "euclidean_distance")
    )
    mismatches = view.rows({"op": "rows", "step": -1, "node": -1, "mismatch": True, "text": "", "start": 0, "n": 1000})
    assert {r["verdict"] for r in mismatches["rows"]} == {"diverged"}
    cells = {
        which: view.view(
            {"op": "view", "row": finding["row"], "which": which, "axes": [1, 2], "fixed": [0, 0, 0], "y0": 0, "x0": 0, "y1": 0, "x1": 0, "size": 512}
        )[1][0]
        for which in ("golden", "mine", "difference")
    }  # fmt: skip
    golden, mine, difference = (
        np.frombuffer(cells[which], "<f4").astype(float) for which in ("golden", "mine", "difference")
    )
    assert np.allclose(mine - golden, difference, atol=1e-7)


def test_two_runs_of_several_generations_are_told_apart_in_the_stepper():
    model = llama()
    with ld.dump(model, name="r", tokens="0") as run:
        generate(model, new=2)
        generate(model, new=2)
    assert [s["label"] for s in RunView(run).overview()["steps"]] == ["0·0 prefill", "1·0 prefill"]


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(1, 30)), elements=st.floats(-9, 9, width=32)),
    st.integers(1, 12),
)
def test_every_cell_shows_the_element_of_largest_magnitude_that_it_covers(values, size):
    view, cells = tensors.window(values, 0, 0, 0, 0, size)
    assert cells.shape == (view["h"], view["w"])
    assert max(cells.shape) <= size
    for y in range(view["h"]):
        for x in range(view["w"]):
            block = values[y * view["fy"] : (y + 1) * view["fy"], x * view["fx"] : (x + 1) * view["fx"]]
            assert abs(cells[y, x]) == np.abs(block).max()
            assert cells[y, x] in block


def test_one_nan_and_one_outlier_survive_any_zoom():
    values = np.zeros((1000, 1000), np.float32)
    values[123, 456], values[777, 888] = np.nan, -5.0
    view, cells = tensors.window(values, 0, 0, 0, 0, 64)
    assert np.isnan(cells).sum() == 1
    assert (cells == -5).sum() == 1
    assert (view["lo"], view["hi"]) == (-5.0, 0.0)


@pytest.mark.parametrize("shape", [(), (5,), (1, 7), (2, 3, 4), (1, 1, 1), (0, 3), (2, 1, 3, 1)])
def test_any_shape_can_be_shown(shape):
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    axes = tensors.default_axes(shape)
    cut = tensors.plane(values, axes, [0] * len(shape))
    assert cut.ndim == 2
    view, _ = tensors.window(cut, 0, 0, 0, 0, 512)
    assert view["rows"] * view["cols"] == cut.size
    assert tensors.histogram(values, 5)["total"] == values.size
