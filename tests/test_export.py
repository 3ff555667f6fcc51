"""An explorer saved as a file: the page needs no kernel and no network; figures suit papers."""

from __future__ import annotations

import base64
import gzip
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page, expect
from torch import nn

import llmdebug_nb as ld
from browser import click_value, violations
from browser import mount as mount_in
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.notebook.explore import explore
from llmdebug_nb.show import bundle, figure, html, saved_page
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.state import _axes, opening, state_of
from models import generate, llama
from recordings import recorded_both, scaled

BROKEN = "model.layers.1.mlp.act_fn"
HOSTILE = "<img src=x onerror=window.hacked=1> $\\frac$ ]]>--\x07"
STATUS = ".llmdebug-message"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    golden, mine = llama(), llama()
    scaled(BROKEN, 1.01)(mine)
    folder = tmp_path_factory.mktemp("runs")
    return recorded_both(golden, mine, lambda m: generate(m, new=4), tokens="0-2", path=folder)


@pytest.fixture(scope="module")
def report(runs):
    return ld.compare(*runs)


class Wide(nn.Module):
    """Gives a tensor of heads with more cells than a picture has, and a NaN."""

    def forward(self, x):
        out = (
            torch.sin(torch.arange(2 * 300 * 520, dtype=torch.float32) * 0.37).reshape(
                1, 2, 300, 520
            )
            * x
        )
        out[0, 1, 7, 9] = torch.nan
        return out


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    model = nn.Sequential(Wide())
    with ld.dump(model, name="wide", path=tmp_path_factory.mktemp("wide")) as run:
        model(torch.ones(1))
    return run


@pytest.fixture
def opened(page: Page):
    """Open a file as a double click does, without a network; no script of it may fail."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda message: (
            wrong.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on(
        "request",
        lambda request: (
            wrong.append(request.url) if not request.url.startswith(("file:", "blob:")) else None
        ),
    )
    page.context.set_offline(True)

    def show(path: Path) -> Page:
        page.goto(path.as_uri())
        return page

    yield show
    assert wrong == []


# --- the page ---


def test_a_page_shows_what_the_explorer_showed(opened, report, tmp_path):
    path = ld.export(
        report, tmp_path / "state.html", at=BROKEN, step=1, side="golden", slice="0,:,:"
    )
    page = opened(path)
    expect(page.locator("h2")).to_contain_text("Made in")
    expect(page.locator(".llmdebug-time-head")).to_contain_text("golden against mine")
    expect(page.locator(".llmdebug-time-now")).to_have_text("1 decode")
    expect(page.locator(".llmdebug-place h3")).to_contain_text(f"{BROKEN} output[0]")
    expect(page.get_by_role("tab", name="golden")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".llmdebug-timeline")).to_be_visible()
    expect(page.locator(".llmdebug-call[aria-current]")).to_contain_text("act_fn")
    expect(page.get_by_role("region", name="Code")).to_contain_text("forward")
    expect(page.get_by_role("button", name="Prove")).to_be_hidden()  # there is no model here
    expect(page.locator(".llmdebug-histogram rect").first).to_be_attached()
    expect(page.locator(STATUS)).to_have_text("")
    expect(page.get_by_role("group", name="Save this view")).to_have_count(0)


def test_a_page_is_walked_and_narrowed_as_the_explorer_is(opened, report, tmp_path):
    page = opened(ld.export(report, tmp_path / "state.html"))
    page.get_by_role("button", name="Records and model tree").click()
    total = page.locator(".llmdebug-total")
    expect(total).to_have_text(f"{len(report.differences) // 3} records")
    page.locator(".llmdebug-time-names span", has_text="2 decode").click()
    expect(page.locator(".llmdebug-time-now")).to_have_text("2 decode")
    page.get_by_label("Filter records").fill("act_fn OUT[0]")
    expect(total).to_have_text("2 records")
    page.get_by_label("mismatches only").check()
    expect(total).to_have_text("1 record")
    page.locator(".llmdebug-record", has_text="act_fn").click()
    expect(page.locator(".llmdebug-place h3")).to_contain_text(BROKEN)
    page.get_by_label("Filter records").fill(">1e3")
    expect(page.locator("[data-none]")).to_have_attribute(
        "data-none", "in a saved page, the filter accepts only words"
    )
    page.get_by_label("Filter records").fill("")
    page.get_by_label("mismatches only").uncheck()
    page.get_by_role("treeitem", name="self_attn").click()
    inside = [
        d
        for d in report.differences
        if d.site.path.startswith("model.layers.1.self_attn") and d.site.step == 2
    ]
    expect(total).to_have_text(f"{len(inside)} records")
    page.get_by_role("grid", name="Records").press("f")
    expect(page.locator(".llmdebug-place h3")).to_contain_text(BROKEN)
    bad = [d for d in report.differences if d.verdict in ("diverged", "unmatched")]
    page.get_by_role("button", name="Next mismatch").click()
    expect(page.locator(".llmdebug-place h3")).to_contain_text(bad[1].site.path)
    page.get_by_role("button", name="Repro").click()
    expect(page.locator(".llmdebug-script").first).to_contain_text("import")
    expect(page.locator(STATUS)).to_have_text("")


def test_the_page_draws_what_the_explorer_draws(opened, wide, tmp_path):
    """Pixel by pixel: cells that cover many elements, a window of them, and the heads."""
    path = ld.export(wide, tmp_path / "wide.html", at="0", slice="0,1,:,:")
    assert "array" in {
        kept["key"].split()[0]
        for kept in saved_page.contents(RunView(wide), state_of(RunView(wide), "0"))["answers"]
    }
    live = page = opened(path)
    seen = []
    for each in ("saved", "live"):
        if each == "live":
            live = page.context.new_page()
            explorer = explore(wide)
            mount_in(live, explorer)
            live.get_by_role("treeitem").first.click()
            live.locator(".llmdebug-record", has_text="out[0]").first.click()
            live.get_by_label("Index on axis head").first.fill("1")
            live.get_by_label("Index on axis head").first.press("Enter")
        canvas = live.locator(".llmdebug-heatmap canvas")
        expect(live.locator(".llmdebug-heatmap .llmdebug-caption")).to_contain_text(
            "token 0–299 ↓, feature 0–519 →, each cell shows the largest magnitude of 2 × 3"
        )
        live.locator(".llmdebug-heads summary").click()
        expect(live.locator(".llmdebug-thumb")).to_have_count(2)
        canvas.focus()
        pictures = [
            canvas.evaluate("el => el.toDataURL()"),
            *live.locator(".llmdebug-thumb canvas").evaluate_all(
                "all => all.map(el => el.toDataURL())"
            ),
        ]
        canvas.press("+")
        expect(live.locator(".llmdebug-heatmap .llmdebug-caption")).to_have_text(
            "token 75–224 ↓, feature 130–389 →, each cell shows the largest magnitude of 1 × 2"
        )
        seen.append([*pictures, canvas.evaluate("el => el.toDataURL()")])
    assert seen[0] == seen[1]


def test_a_value_is_what_was_recorded(opened, runs, tmp_path):
    page = opened(ld.export(runs[0], tmp_path / "run.html", at="lm_head", step=0))
    click_value(page, r"\[0, \d+, \d+\] = ")
    text = page.locator(".llmdebug-value").text_content() or ""
    index, value = re.fullmatch(r"\[(.*)\] = (.*)", text).groups()  # type: ignore[union-attr]
    recorded = runs[0].tensor("lm_head")[tuple(map(int, index.split(", ")))]
    assert np.float32(value) == np.float32(recorded)


def test_what_is_not_in_the_page_is_said(opened, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_page, "_PAGE", replace(saved_page._PAGE, details=1))
    page = opened(ld.export(runs[0], tmp_path / "run.html", at="lm_head", step=0))
    expect(page.locator(".llmdebug-place h3")).to_contain_text("lm_head")
    page.get_by_role("button", name="Previous record").click()
    expect(page.locator(STATUS)).to_have_text(
        "not in this saved page: open the run in a notebook to see it"
    )


def test_a_tensor_without_curves_in_the_page_is_shown_without_a_word(
    opened, runs, tmp_path, monkeypatch
):
    monkeypatch.setattr(saved_page, "_PAGE", replace(saved_page._PAGE, curves=1))
    page = opened(ld.export(runs[0], tmp_path / "run.html", at="lm_head", step=0))
    expect(page.locator(".llmdebug-sparkline")).to_have_count(2)
    page.get_by_role("button", name="Previous record").click()
    expect(page.locator(".llmdebug-place h3")).to_contain_text("lm_head input")
    expect(page.locator(".llmdebug-sparkline")).to_have_count(0)
    expect(page.locator(STATUS)).to_have_text("")


def test_large_tensors_are_one_slice_and_many_rows_a_step(
    opened, wide, runs, tmp_path, monkeypatch
):
    room = replace(saved_page._PAGE, elements=1000, rows=20)
    monkeypatch.setattr(saved_page, "_PAGE", room)
    page = opened(ld.export(wide, tmp_path / "wide.html", at="0"))
    expect(page.locator(".llmdebug-heatmap .llmdebug-caption")).to_contain_text("token 0–299")
    expect(page.locator(".llmdebug-histogram rect").first).to_be_attached()
    page.locator(".llmdebug-heatmap canvas").press("+")
    expect(page.locator(STATUS)).to_have_text(
        "not in this saved page: open the run in a notebook to see it"
    )
    page.locator(".llmdebug-heatmap canvas").press("0")  # what was on show still is
    expect(page.locator(".llmdebug-heatmap .llmdebug-caption")).to_contain_text("token 0–299")
    page = opened(ld.export(runs[0], tmp_path / "run.html", step=1))
    expect(page.locator(".llmdebug-note").first).to_have_text(
        f"This page holds 20 of {len(runs[0])} rows: those of the step it was saved at."
    )
    expect(page.locator(".llmdebug-total")).to_have_text("20 records")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_and_dark(opened, runs, page, scheme, tmp_path):
    page.emulate_media(color_scheme=scheme)
    opened(ld.export(runs[0], tmp_path / "run.html"))
    colour = page.locator("main").evaluate(
        "el => getComputedStyle(el.querySelector('.llmdebug')).backgroundColor"
    )
    assert (max(map(int, re.findall(r"\d+", colour))) > 128) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.browser_context_args(bypass_csp=True)  # the page runs no script but its own
def test_the_page_has_no_accessibility_violation(opened, runs, page, scheme, tmp_path):
    page.emulate_media(color_scheme=scheme)
    for saved in (runs[0], ld.compare(*runs)):
        opened(ld.export(saved, tmp_path / "page.html", at=BROKEN))
        expect(page.locator(".llmdebug-canvas[aria-busy=false]").first).to_be_visible()
        assert violations(page, ".llmdebug") == []


def hostile_report(folder):
    module = nn.Sequential()
    module.add_module(HOSTILE.replace(".", ""), nn.Linear(2, 2))
    for name, factor in (("a", 1.0), ("b", 2.0)):
        with ld.dump(module, name=name, path=folder):
            module(torch.full((1, 2), factor))
    return ld.compare(folder / "a", folder / "b")


def test_hostile_names_stay_text_in_every_file(opened, page, tmp_path):
    report = hostile_report(tmp_path)
    path = ld.export(report, tmp_path / "x.html")
    assert "<img" not in path.read_text(encoding="utf-8")
    opened(path)
    page.get_by_role("button", name="Records and model tree").click()
    page.locator(".llmdebug-record", has_text="<img").first.click()
    expect(page.locator(".llmdebug-place h3")).to_contain_text("<img src=x onerror=window")
    assert page.evaluate("window.hacked") is None
    ElementTree.parse(ld.export(report, tmp_path / "x.svg"))
    assert not [name for name in tmp_path.iterdir() if "<" in name.name]


def test_without_scripts_the_page_still_says_what_came_out(report, browser, tmp_path):
    page = browser.new_page(java_script_enabled=False)
    page.goto(ld.export(report, tmp_path / "x.html").as_uri())
    expect(page.locator("main")).to_contain_text(BROKEN)
    expect(page.locator("main")).to_contain_text("needs scripts to be allowed")
    page.close()


# --- the buttons ---


def test_the_buttons_save_what_is_shown_beside_the_notebook(
    mount, page, opened, report, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mount(explore(report))
    page.get_by_role("tab", name="mine").click()
    buttons = page.get_by_role("group", name="Save this view")
    for suffix in ("HTML", "SVG", "PNG"):
        buttons.get_by_role("button").filter(has_text=suffix).click()
        expect(page.locator(STATUS)).to_have_text(
            re.compile(rf"saved: golden_mine_step-0-prefill_{BROKEN}\.{suffix.lower()}")
        )
    buttons.get_by_role("button").filter(has_text="HTML").press("Enter")
    expect(page.locator(STATUS)).to_have_text(
        re.compile(r"\.2\.html")
    )  # the first one is left as it is
    files = sorted(path.suffix for path in tmp_path.iterdir())
    assert files == [".html", ".html", ".png", ".svg"]
    opened(next(tmp_path.glob("*.2.html")))
    expect(page.get_by_role("tab", name="mine")).to_have_attribute("aria-selected", "true")


def test_a_folder_that_can_not_be_written_is_said(mount, page, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Path,
        "write_text",
        lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")),
    )
    mount(explore(runs[0]))
    page.get_by_role("group", name="Save this view").get_by_role("button").first.click()
    expect(page.locator(STATUS)).to_contain_text("Read-only file system")


# --- figures ---


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_suffix_decides_and_the_same_state_gives_the_same_bytes(
    report, tmp_path, suffix, start
):
    first, second = (
        ld.export(report, tmp_path / f"{name}{suffix}", show="heatmap") for name in "ab"
    )
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


def titles(figure_):
    return [axis.get_title() for axis in figure_.axes if axis.get_title()]


def test_a_figure_has_what_the_state_has(runs, report):
    view, run = report.view(), RunView(runs[0])
    whole = titles(figure.state_figure(view, state_of(view)))
    assert whole[:2] == [
        "error / limit (powers of ten), x: diverged",
        "error along depth, a line for each step",
    ]
    assert whole[2:] == [
        "golden",
        "mine",
        "difference",
        "values, how often",
        "error over limit over all steps",
    ]
    one = state_of(view, BROKEN, 1, side="difference")
    assert titles(figure.state_figure(view, one, ["heatmap"])) == ["difference"]
    assert titles(figure.state_figure(run, state_of(run, "lm_head"))) == [
        "golden", "values, how often", "l2norm over all steps", "max abs over all steps",
    ]  # fmt: skip


def test_a_heat_map_holds_the_slice_that_was_asked_for(wide):
    view = RunView(wide)
    drawn = figure.state_figure(view, state_of(view, "0", cut="0,:,17,:"), ["heatmap"])
    [axis] = [axis for axis in drawn.axes if axis.images]
    expected = wide.tensor("0")[0, :, 17, :]
    assert axis.images[0].get_extent() == [-0.5, 519.5, 1.5, -0.5]
    cells = np.abs(expected.numpy()).reshape(2, -1)
    assert np.nanmax(np.abs(axis.images[0].get_array())) == np.nanmax(cells)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x.txt"}, "expected a name that ends in .html, .png, .svg, .pdf"),
        ({"path": "x.html", "show": "heatmap"}, "a page shows everything"),
        ({"path": "x.png", "show": "heatmaps"},
            "show 'heatmaps': expected some of layers.*nearest: heatmap"),
        ({"path": "x.png"}, "nothing to draw: no tensor is selected; choose one with at="),
        ({"path": "x.png", "show": ["layers"]}, "no layers to show: a single run has no errors"),
        ({"path": "x.png", "at": "lm_hat"}, "has no path 'lm_hat'; nearest: lm_head"),
        ({"path": "x.png", "at": 3.5}, "at: expected the path of a module"),
        ({"path": "x.png", "step": 9}, "step 9 was not recorded; there is 0, 1, 2"),
        ({"path": "x.png", "at": "lm_head", "side": "gold"},
            "side 'gold': expected one of golden.*nearest: golden"),
        ({"path": "x.png", "at": "lm_head", "slice": "0,:,:,:"},
            "slice '0,:,:,:': expected an index for each axis"),
        ({"path": "x.png", "at": "lm_head", "slice": "a"}, "slice 'a': expected an index"),
        ({"path": "no/such/x.png", "at": "lm_head"}, "can't write no/such/x.png"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(runs, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ld.LLMDebugError, match=message) as raised:
        ld.export(runs[0], options.pop("path"), **options)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_kept_is_not_drawn_and_that_is_said(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    with ld.dump(model, name="figures", path=tmp_path, stats_only=True) as run:
        model(torch.ones(1, 2))
    for show, why in (
        ("heatmap", "its values were not kept"),
        ("curves", "it was recorded in one step only"),
    ):
        with pytest.raises(OptionError, match=f"no {show} to show: {why}"):
            ld.export(run, tmp_path / "x.png", at="0", show=show)
    with pytest.raises(OptionError, match="nothing to draw: its values were not kept"):
        ld.export(run, tmp_path / "x.png", at="0")
    assert ld.export(run, tmp_path / "x.html", at="0").exists()


def test_a_tensor_is_named_by_path_difference_finding_or_number(report):
    view = report.view()
    first = report.first_divergence
    for at in (BROKEN, first, report.findings[0], first.index):
        assert state_of(view, at)["selected"] == first.index
    last = state_of(view, BROKEN, 2)
    assert (report.differences[last["selected"]].site.step, last["position"]) == (2, 2)
    assert state_of(view, "lm_head", 0, "input")["which"] == "all"
    with pytest.raises(
        ld.errors.TensorLookupError, match="the report has no 'lm_hat'; nearest: lm_head"
    ):
        state_of(view, "lm_hat")
    with pytest.raises(
        ld.errors.TensorLookupError, match="no output of 'lm_head' in step 7; there is input step 0"
    ):
        state_of(view, "lm_head", 7)
    with pytest.raises(
        ld.errors.TensorLookupError, match="no in of 'lm_head'; there is input step 0"
    ):
        state_of(view, "lm_head", None, "in")


@given(st.lists(st.one_of(st.just(":"), st.integers(0, 99).map(str)), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_slice_names_two_axes_at_most_and_where_the_others_stand(parts):
    text = ", ".join(parts)
    if parts.count(":") > 2:
        with pytest.raises(OptionError):
            _axes(text)
        return
    axes, fixed = _axes(text)
    assert [axis for axis in axes if axis >= 0] == [
        axis for axis, part in enumerate(parts) if part == ":"
    ]
    assert [str(at) for at, part in zip(fixed, parts, strict=True) if part != ":"] == [
        part for part in parts if part != ":"
    ]
    assert len(axes) == 2


def test_an_explorer_exports_its_own_state(report, tmp_path):
    explorer = explore(report)
    explorer.position, explorer.selected = 2, 5
    page = explorer.export(tmp_path / "x.html").read_text(encoding="utf-8")
    assert html.MADE_BY in page
    assert explorer.export(tmp_path / "x.png", "layers").exists()
    assert opening(report.view().overview())["selected"] == report.first_divergence.index


def test_the_command_line_exports(runs, tmp_path, capsys):
    golden, mine = (str(run.path) for run in runs)
    target = tmp_path / "x.svg"
    assert (
        main(["export", golden, mine, "-o", str(target), "--at", BROKEN, "--show", "heatmap"]) == 0
    )
    assert f"written: {target}" in capsys.readouterr().out
    assert main(["export", golden, "-o", str(tmp_path / "x.gif")]) == 3
    assert "expected a name that ends in" in capsys.readouterr().err


def test_a_page_needs_the_code_that_was_built(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_page, "PAGE", tmp_path / "page.js")
    with pytest.raises(bundle.FrontEndMissingError, match=r"page\.js is missing"):
        ld.export(runs[0], tmp_path / "x.html")


# --- the snapshot in a notebook ---


def test_a_snapshot_is_small_and_holds_what_the_first_screen_shows(report):
    state = {**opening(report.view().overview()), "which": "all"}
    small = saved_page.snapshot(report.view(), state)
    assert small is not None
    assert len(small["data"]) <= 300_000
    held = json.loads(gzip.decompress(base64.b64decode(small["data"])))
    assert held["snapshot"]["findings"][0]["where"].startswith(BROKEN)
    keys = {kept["key"].split()[0] for kept in held["answers"]}
    assert {"layers", "calls", "finding", "detail", "array"} <= keys
    rows = {row["id"] for row in held["rows"]}
    assert report.findings[0].difference.index in rows
    nodes = {node["id"] for node in held["nodes"]}
    assert set(held["homes"]) <= nodes | {-1}
    assert set(held["parents"]) <= nodes | {-1}


def test_a_snapshot_that_would_be_too_large_holds_less_and_then_nothing(report, monkeypatch):
    state = opening(report.view().overview())
    whole = saved_page.snapshot(report.view(), state)
    monkeypatch.setattr(saved_page, "_SNAPSHOT_BYTES", len(whole["data"]) - 1)
    less = saved_page.snapshot(report.view(), state)
    assert len(less["data"]) < len(whole["data"])
    monkeypatch.setattr(saved_page, "_SNAPSHOT_BYTES", 10)
    assert saved_page.snapshot(report.view(), state) is None


def test_a_snapshot_of_a_large_tensor_has_a_slice_of_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Identity()
    with ld.dump(model, name="tensor", path=tmp_path):
        model(torch.randn(1024, 1024))
    view = RunView(ld.open_run(tmp_path / "tensor"))
    small = saved_page.snapshot(view, state_of(view, 0))
    held = json.loads(gzip.decompress(base64.b64decode(small["data"])))
    assert [kept["key"] for kept in held["answers"] if kept["key"].startswith("view 0 ")]
