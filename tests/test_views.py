"""The messages to the explorer, for a real run and a real report."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from markupsafe import escape

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.layers import parts
from llmdebug_nb.core.records import Node, Record, Site, Summary
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.show import html, series, tensors
from llmdebug_nb.show.columns import Columns
from llmdebug_nb.show.figure import layer_pictures
from llmdebug_nb.show.layers import DIVERGED, MADE, MATCH, UNMATCHED, layer_errors
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.tree import Tree
from models import generate, gpt2, llama, prompt, t5
from recordings import recorded, recorded_both, scaled
from view_requests import locate_request, row_request, rows_request, view_request

BROKEN = "model.layers.1.mlp.act_fn"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    golden, mine = llama(), llama()
    scaled(BROKEN, 1.01)(mine)
    folder = tmp_path_factory.mktemp("runs")
    return recorded_both(
        golden, mine, lambda m: (m(prompt()), generate(m, new=4)), tokens="0-2", path=folder
    )


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
    return ask(**rows_request(**changes))


def test_the_overview_marks_warm_ups_and_counts_rows(ask, runs):
    overview = ask("overview")
    labels = [step["label"] for step in overview["steps"]]
    assert labels == ["warmup -1", "0 prefill", "1 decode", "2 decode"]
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
        inside = frame.path.eq(node["path"]) | frame.path.str.startswith(
            node["path"] + "." if node["path"] else ""
        )
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
    assert {(row["path"].rpartition(".")[2], row["role"]) for row in filtered} == {
        ("down_proj", "output")
    }


@pytest.mark.parametrize(
    "word",
    ["linear", "LINEAR", "in[0]", "input[", "out[", "float32", "kwargs.", "q_proj", "%", "_", "1"],
)
def test_a_word_finds_the_rows_whose_text_holds_it(ask, view, word):
    everything = _rows(ask)["rows"]
    shown = {
        r["id"]: f"{r['path']} {r['role']}[{r['slot']}] "
        f"{'in' if r['role'] == 'input' else 'out'}[{r['slot']}]"
        for r in everything
    }
    extra = {r["id"]: f" {r['op']} {r['dtype']} {r['verdict'] or ''}" for r in everything}
    wanted = [
        number for number, text in shown.items() if word.lower() in (text + extra[number]).lower()
    ]
    assert [row["id"] for row in _rows(ask, text=word)["rows"]] == wanted


def test_the_list_of_a_run_grows_with_its_recording():
    module = torch.nn.Linear(2, 2)
    with ld.dump(module, name="live", tokens="all", stats_only=True) as run:
        module(torch.ones(1, 2))
        view = RunView(run)
        asked = {"step": -1, **EVERYTHING, "text": "linear", "start": 0, "n": 9}
        before = view.listed(asked)["total"]
        module(torch.ones(1, 2))
        assert view.listed(asked)["total"] == view.overview()["rows"] == 2 * before > 0


class Spelled:
    """A tokenizer that spells its ids."""

    def decode(self, ids):
        assert isinstance(ids, list)
        return " ".join(map(str, ids))


def test_with_a_tokenizer_steps_have_the_text_that_they_were_given(runs):
    ids = generate(llama(), new=4)[0].tolist()
    view = RunView(runs[0], Spelled())
    texts = {(step["generation"], step["step"]): step["text"] for step in view.overview()["steps"]}
    assert texts == {
        (-1, 0): Spelled().decode(prompt()[0].tolist()),
        (0, 0): Spelled().decode(ids[:7]),
        (0, 1): str(ids[7]),
        (0, 2): str(ids[8]),
    }
    report = ld.compare(*runs, explain=False).view(Spelled())
    assert {step["text"] for step in report.overview()["steps"]} == set(texts.values())
    assert {step["text"] for step in RunView(runs[0]).overview()["steps"]} == {""}


def test_a_long_prompt_shows_its_end_and_what_has_no_ids_shows_none():
    model = torch.nn.Sequential(torch.nn.Embedding(200, 4), torch.nn.Linear(4, 4))
    with ld.dump(model, name="long"):
        model(torch.arange(100).reshape(1, 100))
    [step] = RunView(ld.open_run("long"), Spelled()).overview()["steps"]
    assert step["text"] == "…" + " ".join(map(str, range(36, 100)))
    with ld.dump(model[1], name="none"):
        model[1](torch.ones(1, 4))
    assert [
        step["text"] for step in RunView(ld.open_run("none"), Spelled()).overview()["steps"]
    ] == [""]


def test_a_tokenizer_that_can_not_decode_is_refused_in_a_line(runs):
    class Wrong:
        def decode(self, ids):
            raise KeyError(ids[0])

    with pytest.raises(
        ld.errors.OptionError, match=r"expected one with a method decode\(ids\), got int"
    ):
        RunView(runs[0], 3)
    with pytest.raises(
        ld.errors.OptionError, match=r"Wrong can't decode the ids of step 0 \(KeyError"
    ):
        RunView(runs[0], Wrong())


def _flow(ask, row):
    return {
        one["relation"]: ([link["row"] for link in one["links"]], one["total"])
        for one in ask("detail", row=row)["flow"]
    }


def test_the_dataflow_is_walked_both_ways(ask):
    at = {(r["step"], r["path"], r["role"], r["slot"]): r["id"] for r in _rows(ask)["rows"]}
    norm = "model.layers.1.input_layernorm"
    normed = at[1, norm, "output", "0"]
    attention = [
        ("self_attn", "kwargs.hidden_states"),
        *((f"self_attn.{x}_proj", "0") for x in "qkv"),
    ]
    takers = [at[1, f"model.layers.1.{path}", "input", slot] for path, slot in attention]
    assert _flow(ask, normed) == {
        "inputs": ([at[1, norm, "input", "0"]], 1),
        "consumers": (takers, 4),
    }
    query = at[1, "model.layers.1.self_attn.q_proj", "input", "0"]
    assert ask("detail", row=query)["producer"] == normed
    assert _flow(ask, query) == {
        "outputs": ([at[1, "model.layers.1.self_attn.q_proj", "output", "0"]], 1),
        "siblings": ([row for row in takers if row != query], 3),
    }


def test_each_edge_of_a_run_is_a_link_from_both_ends(runs):
    view = RunView(runs[0])
    details = [view.detail({"op": "detail", "row": record.id}) for record in runs[0].records()]

    def links(relation):
        return {
            (d["row"]["id"], link["row"])
            for d in details
            for f in d["flow"]
            if f["relation"] == relation
            for link in f["links"]
        }

    produced = {(d["producer"], d["row"]["id"]) for d in details if d["producer"] >= 0}
    assert links("consumers") == produced
    assert {(b, a) for a, b in links("outputs")} == links("inputs")


class Fan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = (
            torch.nn.ReLU(),
            torch.nn.ModuleList(torch.nn.ReLU() for _ in range(30)),
        )

    def forward(self, x):
        made = self.first(x)
        return sum(each(made) for each in self.rest)


def test_a_tensor_that_is_taken_often_has_a_few_links_and_their_count():
    model = Fan()
    with ld.dump(model, name="fan") as run:
        model(torch.ones(2))
    made = run.index.query(tuple, "SELECT id FROM rows WHERE path = 'first' AND role = 'output'")[
        0
    ][0]
    for view in (RunView(run), ld.compare(run, run).view()):
        row = (
            next(
                i
                for i in range(99)
                if view.detail({"op": "detail", "row": i})["row"]["path"] == "first"
            )
            + 1
        )
        (inputs, consumers) = view.detail({"op": "detail", "row": row})["flow"]
        assert (inputs["relation"], inputs["total"]) == ("inputs", 1)
        assert (len(consumers["links"]), consumers["total"]) == (12, 30)
    plan = run.index.query(tuple, f"EXPLAIN QUERY PLAN SELECT id FROM rows WHERE producer = {made}")
    assert "by_producer" in plan[0][3]


def test_the_same_tensor_over_all_steps_leads_to_its_record_at_each(view, runs):
    wanted = {"path": BROKEN, "role": "output"}
    request = rows_request(text=BROKEN)
    rows = [r for r in view.rows(request)["rows"] if {name: r[name] for name in wanted} == wanted]
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    lines = {
        one["figure"]: one["points"]
        for one in view.series({"op": "series", "row": rows[2]["id"], "n": 99})["lines"]
    }
    for points in lines.values():
        assert [(p["step"], p["row"]) for p in points] == [(r["step"], r["id"]) for r in rows]
    if view.kind == "run":
        values = [runs[0].load(runs[0].record(r["id"])).double() for r in rows]
        assert [p["value"] for p in lines["l2norm"]] == pytest.approx(
            [float(v.norm()) for v in values]
        )
        assert [p["value"] for p in lines["max abs"]] == pytest.approx(
            [float(v.abs().max()) for v in values]
        )
    else:
        assert [p["value"] for p in lines["error over limit"]] == pytest.approx(
            [r["error"] / r["limit"] for r in rows]
        )
        assert any(p["value"] > 1 for p in lines["error over limit"])


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=50), st.integers(1, 12))
def test_a_long_series_keeps_its_peaks_in_few_points(values, most):
    points = series.line("f", [(i, 10 * i, value) for i, value in enumerate(values)], most)[
        "points"
    ]
    assert len(points) <= most
    assert all(point["row"] == 10 * point["step"] for point in points)
    assert [point["step"] for point in points] == sorted({point["step"] for point in points})
    json.dumps(points, allow_nan=False)
    shown = [point["value"] for point in points]
    known = [value for value in values if value is not None]
    broken = [value for value in known if np.isnan(value) or np.isinf(value)]
    if broken:
        assert {"nan", "inf", "-inf"} & set(map(str, shown))
    elif known:
        assert max(map(abs, known)) == max(abs(value) for value in shown if value is not None)


def _summaries(runs, view, row):
    """The recorded summaries that a row stands for."""
    if view.kind == "run":
        return [runs[0].record(row).summary]
    pair = view.differences[row].pair
    return [record.summary for record in (pair.golden, pair.mine) if record]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (">1.5", lambda s: s.max > 1.5),
        ("<-2e0", lambda s: s.min < -2),
        ("<=0 >=0", lambda s: s.min <= 0 <= s.max),
        ("abs<1e-1", lambda s: -0.1 < s.min <= s.max < 0.1),
        ("abs>2 bfloat", lambda s: False),
        ("abs>2 float", lambda s: "float" in s.dtype and (s.max > 2 or s.min < -2)),
        ("l2norm>9 mean<0", lambda s: s.l2norm > 9 and s.mean < 0),
        ("nan", lambda s: s.nan > 0),
        ("inf", lambda s: s.inf > 0),
        (">inf", lambda s: False),
    ],
)
def test_figures_filter_rows_as_the_recorded_summaries_say(ask, view, runs, text, passes):
    everything = [row["id"] for row in _rows(ask)["rows"]]
    wanted = [
        row for row in everything if any(passes(summary) for summary in _summaries(runs, view, row))
    ]
    assert [row["id"] for row in _rows(ask, text=text)["rows"]] == wanted
    found = ask(**locate_request(-1, 1, text=text))["row"]
    assert (found and found["id"]) == (wanted[0] if wanted else None)


@pytest.fixture(scope="module")
def poisoned():
    """Two runs of a model that makes NaN and infinities, in other places in each run."""
    given = torch.tensor([[0.0, 1.0, -4.0, 0.5]])
    models = []
    for shift in (0.0, 4.0):
        models.append(torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()))
        models[-1][1].register_forward_hook(
            lambda module, args, out, shift=shift: torch.log(args[0] + shift)
        )
    return recorded_both(*models, lambda model: model(given))


def test_nan_and_inf_are_found_on_either_side_of_a_pair_and_have_no_size(poisoned):
    def listed(view, text):
        return {(row["path"], row["role"]) for row in view.rows(rows_request(text=text))["rows"]}

    golden, mine = map(RunView, poisoned)  # log(-4) is NaN, log(0) is -inf
    made = {("1", "output"), ("", "output")}
    assert listed(golden, "nan") == listed(golden, "inf") == made
    assert listed(mine, "nan") == set()
    assert listed(mine, "inf") == listed(mine, "<=-inf") == made
    assert listed(golden, "<9 output") == {("0", "output")}
    report = ld.compare(*poisoned).view()
    assert listed(report, "nan") == made
    assert listed(report, "nan_") == listed(report, "inf nan input") == set()


@pytest.mark.parametrize("text", ["lm_head >", "abs>x", "<1e-", ">nan", "size>3", "<lambda>"])
def test_a_filter_that_makes_no_sense_says_so_and_hides_nothing_behind_an_empty_list(view, text):
    page = view.rows(rows_request(text=text))
    assert (page["total"], page["rows"]) == (0, [])
    assert repr(text.split()[-1]) in page["problem"]
    assert view.row(row_request(3, text=text))["index"] == -1
    answer, _ = Bridge(view).answer({**locate_request(-1, 1, text=text), "re": 1})
    assert "can't read the filter" in answer["error"]


def test_next_and_previous_walk_the_whole_list_there_and_back(ask):
    ids = [row["id"] for row in _rows(ask)["rows"]]
    seen, row = [], -1
    while True:
        found = ask(**locate_request(row, 1))
        if found["row"] is None:
            break
        row = found["row"]["id"]
        seen.append(row)
        assert _rows(ask, step=found["row"]["step"])["rows"][found["index"]]["id"] == row
    assert seen == ids
    last = ask(**locate_request(-1, -1))["row"]["id"]
    assert last == ids[-1]
    assert ask(**locate_request(last, -1))["row"]["id"] == ids[-2]


def test_detail_names_axes_code_and_producer(ask, runs):
    row = next(
        r
        for r in _rows(ask, step=1)["rows"]
        if r["path"] == "model.layers.0.mlp.down_proj" and r["role"] == "input"
    )
    detail = ask("detail", row=row["id"])
    assert [axis["name"] for axis in detail["sides"][0]["axes"]] == ["batch", "token", "feature"]
    code = detail["sides"][0]["code"]
    assert torch.equal(
        eval(code, {"golden": runs[0]}),
        runs[0].tensor("model.layers.0.mlp.down_proj", role="input"),
    )
    norm = next(
        r
        for r in _rows(ask, step=1)["rows"]
        if r["path"] == "model.layers.0.input_layernorm" and r["role"] == "input"
    )
    detail = ask("detail", row=norm["id"])
    assert detail["producer_label"].startswith("model.embed_tokens output[0]")
    producer = ask(**row_request(detail["producer"]))["row"]
    assert producer["path"] == "model.embed_tokens"


def test_a_window_holds_the_values_themselves_when_it_is_small(ask, runs):
    row = next(
        r for r in _rows(ask, step=1)["rows"] if r["path"] == "lm_head" and r["role"] == "output"
    )
    view, (buffer,) = ask(**view_request(row["id"], x0=4, y1=1, x1=9, size=64))
    shown = [view[name] for name in ("h", "w", "fy", "fx", "rows", "cols")]
    assert shown == [1, 5, 1, 1, 1, 96]
    got = np.frombuffer(buffer, "<f4")
    assert np.array_equal(got, runs[0].tensor("lm_head", as_numpy=True)[0, 0, 4:9])
    counts = ask("histogram", row=row["id"], which="golden", bins=10)
    assert sum(counts["counts"]) == counts["total"] == 96


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"op": "detail", "row": 1 << 50}, "no"),
        ({"op": "children", "parent": 0, "start": 0, "n": "x"}, "Expected `int`"),
        (rows_request(node=1 << 40), "no node"),
        (view_request(5, axes=[7, 8], fixed=[]), "axes"),
        ({"op": "nosuch"}, "unknown op"),
    ],
)
def test_requests_that_make_no_sense_are_answered_with_an_error(view, request_, says):
    answer, _ = Bridge(view).answer({**request_, "re": 3})
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
    mismatches = view.rows(rows_request(mismatch=True))
    assert {r["verdict"] for r in mismatches["rows"]} == {"diverged"}
    golden, mine, difference = (
        np.frombuffer(view.view(view_request(finding["row"], which=which))[1][0], "<f4").astype(
            float
        )
        for which in ("golden", "mine", "difference")
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
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 30), st.integers(1, 30)),
        elements=st.floats(-9, 9, width=32),
    ),
    st.integers(1, 12),
)
def test_every_cell_shows_the_element_of_largest_magnitude_that_it_covers(values, size):
    view, cells = tensors.window(values, 0, 0, 0, 0, size)
    assert cells.shape == (view["h"], view["w"])
    assert max(cells.shape) <= size
    for y in range(view["h"]):
        for x in range(view["w"]):
            block = values[
                y * view["fy"] : (y + 1) * view["fy"], x * view["fx"] : (x + 1) * view["fx"]
            ]
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


def test_values_beyond_float32_are_drawn_as_infinity_without_a_warning(tmp_path):
    torch.save(torch.tensor([[1e300, -1e300], [1.0, 2.0]], dtype=torch.float64), tmp_path / "x.pt")
    view, cells = tensors.window(np.array([[1e300, 2.0]]), 0, 0, 0, 0, 64)
    assert cells.tolist() == [[np.inf, 2.0]]
    assert (view["lo"], view["hi"]) == (2.0, 2.0)
    for kind in ("html", "png"):
        assert ld.export(tmp_path / "x.pt", tmp_path / f"x.{kind}", at=0).stat().st_size


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.permutations(range(4)),
    st.integers(1, 6),
    st.integers(0, 2**31),
)
def test_each_head_is_the_slice_that_the_heat_map_would_show(shape, order, size, seed):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    axis, other, *axes = order
    fixed = [0, 0, 0, 0]
    fixed[other] = shape[other] - 1
    view, cells = tensors.heads(values, axis, axes, fixed, size)
    assert cells.shape == (view["count"], view["h"], view["w"])
    assert view["count"] == view["total"] == shape[axis]
    for head in range(shape[axis]):
        cut = np.moveaxis(values, [axis, other, *axes], range(4))[head, fixed[other]]
        assert np.array_equal(cells[head], tensors.window(cut, 0, 0, 0, 0, size)[1])
    assert (view["lo"], view["hi"]) == (cells.min(), cells.max())


def test_heads_come_in_one_answer_of_bounded_size(view):
    [row] = view.rows(rows_request(text="lm_head out", n=1))["rows"]
    request = {"op": "heads", "row": row["id"], "which": "golden", "axis": 2, "first": 0}
    request |= {"axes": [0, 1], "fixed": [0, 0, 0]}
    for first, count in ((0, 64), (64, 32), (1000, 0)):
        answer, (buffer,) = view.heads({**request, "first": first, "size": 1000})
        assert (answer["first"], answer["count"], answer["total"]) == (min(first, 96), count, 96)
        values = np.frombuffer(buffer, "<f4").reshape(count, answer["h"], answer["w"])
        shown = np.moveaxis(view.array(request["row"], "golden"), 2, 0)[first : first + count]
        assert np.array_equal(values, shown) or count == 0
    error, _ = Bridge(view).answer({**request, "re": 1, "axis": 1, "size": 9})
    assert "expected one of a 3-d tensor beside" in error["error"]
    one_nan = np.zeros((2, 40, 40), np.float32)
    one_nan[1, 17, 23] = np.nan
    _, cells = tensors.heads(one_nan, 0, [1, 2], [0, 0, 0], 4)
    assert np.isnan(cells).sum(axis=(1, 2)).tolist() == [0, 1]


# --- layers ---


def _nodes(model):
    """The topology of a model, as a recording writes it."""
    at = {path: i for i, (path, _) in enumerate(model.named_modules())}
    return [
        Node(
            path,
            path.rpartition(".")[2],
            type(module).__name__,
            at[path.rpartition(".")[0]] if path else -1,
        )
        for path, module in model.named_modules()
    ]


def _paths(nodes):
    tree = Tree(nodes, Counter(), Counter())
    return [tree.nodes[i].path for i in parts(tree.nodes)]


class _Stages(torch.nn.Module):
    """No stack at all."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (llama, "model.embed_tokens model.layers.0 model.layers.1 model.norm "
                "model.rotary_emb lm_head"),
        (gpt2, "transformer.wte transformer.wpe transformer.drop transformer.h.0 "
               "transformer.h.1 transformer.ln_f lm_head"),
        (
            t5,
            "shared encoder.embed_tokens encoder.block.0 encoder.block.1 "
            "encoder.final_layer_norm encoder.dropout"
            " decoder.embed_tokens decoder.block.0 decoder.block.1 decoder.final_layer_norm "
            "decoder.dropout lm_head",
        ),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU()),
            torch.nn.Linear(2, 2)), "0 1 2"),
        (_Stages, "first second"),
        (lambda: torch.nn.ModuleDict({"module": _Stages()}), "module.first module.second"),
        (lambda: torch.nn.Linear(2, 2), ""),
    ],
    ids=["llama", "gpt2", "t5", "sequential", "no stack", "wrapped", "one module"],
)  # fmt: skip
def test_layers_are_the_members_of_stacks_and_what_stands_beside_them(make, layers):
    assert _paths(_nodes(make())) == (layers.split(" ") if layers else [""])


VERDICTS = ["match", "within_noise", "diverged", "unmatched"]
FIGURES = st.one_of(st.none(), st.sampled_from([0.0, 1e-9, 0.5, 2.0, float("inf"), float("nan")]))
PLACES = [
    "",
    "embed",
    "layers",
    "layers.0",
    "layers.0.mlp",
    "layers.1/aten.add",
    "layers.1.attn",
    "head",
    "nowhere.else",
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(PLACES), st.integers(0, 3), st.sampled_from(VERDICTS), FIGURES, FIGURES
        )
    )
)
def test_each_cell_holds_the_worst_row_of_its_layer_and_step(rows):
    nodes = [
        Node("", "", "M", -1),
        Node("embed", "embed", "E", 0),
        Node("layers", "layers", "ModuleList", 0),
    ]
    nodes += [Node(f"layers.{n}", str(n), "L", 2) for n in (0, 1)]
    nodes += [
        Node("layers.0.mlp", "mlp", "F", 3),
        Node("layers.1.attn", "attn", "A", 4),
        Node("head", "head", "H", 0),
    ]
    found = _layers(nodes, 4, [(Site(path, step=step), *judged) for path, step, *judged in rows])
    seen = {}
    for path, step, verdict, error, limit in rows:
        layer = next(
            (own for own in ("embed", "layers.0", "layers.1", "head") if path.startswith(own)), ""
        )
        seen.setdefault(layer, {}).setdefault(step, []).append((verdict, error, limit))
    order = [layer for layer in seen if layer] + ["" for layer in seen if not layer]
    assert [layer["path"] for layer in found.layers] == order
    rank = {"unmatched": 1, "match": 3, "within_noise": 4, "expected": 5, "diverged": 6}
    for y, layer in enumerate(order):
        for x in range(4):
            cell = seen[layer].get(x, [])
            assert found.state[y, x] == max((rank[verdict] for verdict, _, _ in cell), default=0)
            if not cell:
                assert found.row[y, x] == -1
                continue
            chosen = rows[found.row[y, x]]
            assert chosen[1] == x
            assert rank[chosen[2]] == found.state[y, x]
            worst = max(
                _beyond(error, limit) for verdict, error, limit in cell if verdict == chosen[2]
            )
            assert _beyond(chosen[3], chosen[4]) == worst
            for array, value in ((found.error, chosen[3]), (found.limit, chosen[4])):
                assert np.array_equal(
                    array[y, x], np.float32("nan" if value is None else value), equal_nan=True
                )


def test_right_weights_do_not_hide_that_what_a_module_computes_has_no_partner():
    nodes = [Node("", "", "M", -1), Node("head", "head", "H", 0)]
    rows = [("output", 0, "unmatched"), ("weight", 0, "match"), ("weight", 1, "match")]
    rows += [("output", 2, "match"), ("weight", 2, "diverged")]
    found = _layers(
        nodes,
        3,
        [(Site("head", role=r, step=step), verdict, None, None) for r, step, verdict in rows],
    )
    assert found.state.tolist() == [[UNMATCHED, MATCH, DIVERGED]]
    assert found.row.tolist() == [[0, 2, 4]]


def _layers(nodes, steps, judged):
    """Return the map of rows: each a site, a verdict, an error and its limit."""
    summary = Summary("float32", (1,))
    differences = [
        Difference(i, Pair(Record(i, site, i, "op", summary), None, ""), *judgement)
        for i, (site, *judgement) in enumerate(judged)
    ]
    columns = Columns(differences, [d.site.step for d in differences])
    return layer_errors(Tree(nodes, Counter(), Counter()), columns, steps)


def _beyond(error, limit):
    """Error over limit; -1 if there is no limit or no error."""
    if error is None or error != error:
        return -1.0
    if error == 0:
        return 0.0
    if limit is None or limit != limit or limit == 0:
        return float("inf")
    return -1.0 if error == limit == float("inf") else error / limit


def test_the_map_of_a_report_comes_in_one_answer_and_leads_to_the_broken_layer(runs):
    view = ld.compare(*runs).view()
    answer, buffers = Bridge(view).answer({"op": "layers", "re": 1})
    json.dumps(answer, allow_nan=False)
    kinds = "<f4", "<f4", "<i4", "u1", "<f4", "<i4"
    error, limit, row, state, share, differing = (
        np.frombuffer(buffer, kind).reshape(len(answer["layers"]), answer["steps"])
        for buffer, kind in zip(buffers, kinds, strict=True)
    )
    paths = [layer["path"] for layer in answer["layers"]]
    assert paths[0] == "model.embed_tokens"
    assert paths.index("model.layers.0") < paths.index("model.layers.1") < paths.index("model.norm")
    assert answer["layers"][-1]["node"] == -1  # the root and model.model
    broken = paths.index("model.layers.1")
    assert (state[broken] == MADE).all()
    assert (state[:broken] == MATCH).all()
    assert (error[broken] > limit[broken]).all()
    for at, index in np.ndenumerate(row):
        difference = view.differences[index]
        assert view.step_index[difference.site.generation, difference.site.step] == at[1]
        assert at[0] == len(paths) - 1 or difference.site.path.startswith(paths[at[0]])
        found = difference.differing
        assert answer["differing"][differing[at]] == (found.where if found else "")
        known = None if found is None else found.share
        assert np.isnan(share[at]) if known is None else share[at] == np.float32(known)
    assert (share == 1).any()  # the factor is that of all tokens of the prompt
    for layer in answer["layers"][:-1]:
        assert view.tree.nodes[layer["node"]].path == layer["path"]


def test_a_large_map_is_made_quickly_enough_to_be_asked_for():
    nodes = [Node("", "", "M", -1), Node("layers", "layers", "ModuleList", 0)]
    nodes += [Node(f"layers.{n}", str(n), "L", 1) for n in range(100)]
    sites = (Site(f"layers.{i % 100}", step=i // 100) for i in range(100_000))
    found = _layers(nodes, 1000, [(site, "match", 0.0, 1.0) for site in sites])
    assert found.row.shape == (100, 1000)
    assert np.array_equal(found.row, np.arange(100_000).reshape(1000, 100).T)
    figures = found.error, found.limit, found.row, found.state, found.share, found.differing
    assert sum(part.nbytes for part in figures) < 2_500_000


# --- tree ---


def test_a_module_counts_what_diverged_and_stayed_alone_below_it_and_has_the_worst_verdict(runs):
    view = ld.compare(*runs).view()
    for i, node in enumerate(view.tree.nodes):
        below = [
            d
            for d in view.differences
            if f"{d.site.path}.".startswith(f"{node.path}." if node.path else "")
        ]
        shown = view.tree._view(i)
        assert shown["rows"] == len(below), node.path
        assert shown["bad"] == sum(d.verdict == "diverged" for d in below)
        assert shown["unmatched"] == sum(d.verdict == "unmatched" for d in below)
        assert shown["verdict"] == next(
            (v for v in ("diverged", "within_noise", "match") if v in {d.verdict for d in below}),
            None,
        )


def test_operators_count_where_they_were_called_and_parameters_of_no_module_nowhere():
    nodes = [Node("", "", "M", -1), Node("a", "a", "A", 0), Node("a.b", "b", "B", 1)]
    rows = Counter(
        {
            "a.b/aten.mul.Tensor": 2,
            "a/aten.add.Tensor": 3,
            "/aten.cat": 4,
            "a.gone.deeper": 5,
            "Other~1.x": 6,
        }
    )
    near, alone = Counter({"a/aten.add.Tensor": 1}), Counter({"a.b/aten.mul.Tensor": 2})
    tree = Tree(nodes, rows, Counter(), (near, alone, Counter()))
    assert [tree._view(i)["rows"] for i in range(3)] == [14, 10, 2]
    assert [tree._view(i)["verdict"] for i in range(3)] == [
        "within_noise",
        "within_noise",
        "unmatched",
    ]


def test_a_single_run_has_no_verdicts_in_its_tree(runs):
    view = RunView(runs[0])
    assert {view.tree._view(i)["verdict"] for i in range(len(view.tree.nodes))} == {None}


# --- findings and what differs most ---


def test_a_finding_brings_its_script_and_says_why_there_is_none(runs):
    report = ld.compare(*runs)
    view = report.view()
    assert view.overview()["summary"] == report.summary()
    detail = view.finding({"op": "finding", "finding": 0})
    assert detail["script"] == report.findings[0].repro
    assert detail["save"] == 'report.findings[0].save_repro("repro.py")'
    report.findings[0] = dataclasses.replace(report.findings[0], repro=None)
    detail = report.view().finding({"op": "finding", "finding": 0})
    assert detail["script"] == ""
    assert "its tensors were not recorded in both runs" in detail["why"]
    answer, _ = Bridge(view).answer({"op": "finding", "re": 1, "finding": 7})
    assert "no finding 7" in answer["error"]


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        (2, 3, 4),
        elements=st.floats(-9, 9, width=32) | st.sampled_from([np.nan, np.inf]),
    ),
    hnp.arrays(
        np.float32,
        (2, 3, 4),
        elements=st.floats(-9, 9, width=32) | st.sampled_from([np.nan, np.inf]),
    ),
    st.integers(1, 30),
)
def test_the_worst_elements_are_those_of_largest_difference(golden, mine, n):
    elements, differing = tensors.worst(golden, mine, n)
    sizes = {}
    for at in np.ndindex(golden.shape):
        a, b = float(golden[at]), float(mine[at])
        same = a == b or (a != a and b != b)
        size = abs(b - a)
        sizes[at] = 0.0 if same else float("inf") if size != size else size
    expected = [at for at in sorted(sizes, key=lambda at: (-sizes[at], at)) if sizes[at]]
    assert differing == len(expected)
    got = [tuple(element["index"]) for element in elements]
    assert [sizes[at] for at in got] == [sizes[at] for at in expected[:n]]
    assert len(set(got)) == len(got)
    for at, element in zip(got, elements, strict=True):
        assert element["golden"] == tensors.number(float(golden[at]))
        assert element["mine"] == tensors.number(float(mine[at]))


def test_worst_elements_of_any_shape_and_of_none():
    assert tensors.worst(np.float32(1.0), np.float32(3.0), 5)[0] == [
        {"index": [], "golden": 1.0, "mine": 3.0, "difference": 2.0}
    ]
    assert tensors.worst(np.zeros((0, 3)), np.zeros((0, 3)), 5) == ([], 0)


def test_what_only_a_comparison_has_is_an_error_of_a_run(runs):
    for request in (
        {"op": "layers"},
        {"op": "finding", "finding": 0},
        {"op": "worst", "row": 1, "n": 5},
    ):
        answer, _ = Bridge(RunView(runs[0])).answer({**request, "re": 1})
        assert "compare it with another one" in answer["error"]


# --- without a kernel ---


def test_the_page_without_a_kernel_shows_layers_findings_scripts_and_worst_elements(runs):
    page = ld.compare(*runs).view()
    text = html.page(page)
    finding = page.finding({"op": "finding", "finding": 0})
    assert escape(page.overview()["summary"]) in text
    assert 'alt="how many elements differ by how much, and golden against mine"' in text
    assert escape(finding["script"]) in text
    assert escape(finding["save"]) in text
    assert "error over limit by layer and token" in text
    assert text.count("data:image/png") == 3
    assert "Worst elements: 10 of" in text
    assert "<h2>Layers and tokens" not in html.page(RunView(runs[0]))


def test_pictures_of_layers_are_drawn_whatever_is_in_them():
    nodes = [Node("", "", "M", -1), Node("$a^", "$a^", "A", 0), Node("b" * 90, "b" * 90, "B", 0)]
    for rows in (
        [("$a^", "unmatched", None, None)],
        [("$a^", "match", 0.0, 0.0), ("b" * 90, "diverged", float("inf"), 0.0)],
        [("", "diverged", 0.5, 0.1), ("$a^", "within_noise", 0.01, 0.1)],
    ):
        errors = _layers(nodes, 2, [(Site(path), *judged) for path, *judged in rows])
        assert layer_pictures(errors, ["$0", "1 decode"]).startswith("data:image/png;base64,")


def test_sides_that_lie_differently_have_axes_of_their_own_and_worst_elements_of_the_difference():
    golden, mine, ids = llama(), llama(), prompt()
    scaled(BROKEN, 1.5)(mine)
    theirs = recorded(golden, torch.cat([ids.flip(1), ids]), name="golden")
    view = ld.compare(theirs, recorded(mine, ids, name="mine")).view()
    row = view.findings[0].difference.index
    sides = {side["which"]: side for side in view.detail({"op": "detail", "row": row})["sides"]}
    for which, batch in (("golden", 2), ("mine", 1), ("difference", 1)):
        assert [axis["size"] for axis in sides[which]["axes"]] == [
            batch,
            *view.array(row, "mine").shape[1:],
        ]
    elements = view.worst({"op": "worst", "row": row, "n": 5})["elements"]
    golden, mine = view.array(row, "golden")[1:], view.array(row, "mine")
    for element in elements:
        at = tuple(element["index"])
        assert (element["golden"], element["mine"]) == (golden[at], mine[at])
    assert abs(elements[0]["difference"]) == pytest.approx(np.abs(mine - golden).max(), rel=1e-6)
