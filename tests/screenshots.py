"""Take the pictures of the docs from a real JupyterLab; run by `make screenshots`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from lab_server import Lab, show_theme
from test_notebooks import ENVIRONMENTS, NOTEBOOKS

OUT = Path(__file__).parent.parent / "out" / "screenshots"
LARGEST = 150_000
CELLS = (
    "%load_ext llmdebug_nb\n"
    "import copy, torch\n"
    "from models import generate, llama\n"
    "model = llama(num_hidden_layers=6)\n"
    "port = copy.deepcopy(model)\n"
    "port.model.layers[3].mlp.act_fn = torch.nn.GELU()",
    "%%llmdump model --tokens 0-5 --name golden\nids = generate(model, new=7)",
    "%%llmdump port --tokens 0-5 --name mine\n_ = generate(port, ids[:, :7], new=7)",
    "%llmcompare golden mine",
    "%llmexplore golden",
    "%%llmstep port --when diverges --golden golden\ngenerate(port, ids[:, :7], new=7)",
)


def test_pictures_of_explorers_stepping_and_sidebar_in_both_themes(lab: Lab, page: Page) -> None:
    page.set_viewport_size({"width": 1240, "height": 3200})
    lab.open(page, lab.write_notebook("pictures.ipynb", *CELLS))
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    for index in range(4):
        lab.run_cell(page, index)
    compare = cells.nth(3)
    expect(compare.locator(".llmdebug-answer h2")).to_contain_text(
        "model.layers.3.mlp.act_fn", timeout=60_000
    )
    expect(compare.locator(".llmdebug-canvas[aria-busy=false]")).to_have_count(3)

    lab.run_cell(page, 4)
    run = cells.nth(4)
    run.get_by_role("toolbar", name="Token stepper").get_by_text("2 decode").click(timeout=60_000)
    for name in ("model", "layers", "3 LlamaDecoderLayer", "self_attn"):
        run.get_by_role("treeitem", name=re.compile(f"^{name}")).first.click()
    run.locator(".llmdebug-record", has_text="q_proj out[0]").click()
    expect(run.locator(".llmdebug-canvas[aria-busy=false]")).to_be_visible()

    lab.run_cell(page, 5)
    stepping = cells.nth(5)
    expect(stepping.locator(".jp-OutputArea")).to_contain_text(
        "model.layers.3.mlp.act_fn", timeout=60_000
    )
    expect(stepping.get_by_role("button", name="replace")).to_be_visible()
    for theme in themes(page):
        picture(compare.locator(".llmdebug"), f"compare_{theme}", 1500)
        picture(run.locator(".llmdebug"), f"run_{theme}")
        picture(stepping, f"stepping_{theme}")

    page.evaluate("() => { void window.jupyterapp.commands.execute('llmdebug:show-runs'); }")
    listed = page.get_by_role("listbox", name="Runs and reports")
    listed.get_by_role("option", name=re.compile("^golden")).first.click(timeout=60_000)
    for theme in themes(page):
        picture(page.locator("#jp-llmdebug-panel"), f"sidebar_{theme}", 260)
    stepping.get_by_role("button", name="abort").click()


@pytest.mark.timeout(1200)  # vLLM takes a minute to import, and ten on a busy machine
@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_pictures_of_engines_in_their_notebooks(lab: Lab, page: Page, engine: str) -> None:
    folder, reason = ENVIRONMENTS[f"{engine}_vs_transformers"]
    if not (folder / "bin" / "python").exists():
        pytest.skip(reason)
    page.set_viewport_size({"width": 1240, "height": 3200})
    path = NOTEBOOKS / f"{engine}_vs_transformers.ipynb"
    lab.open(page, lab.copy_notebook(path, folder / "bin" / "python"))
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    report = cells.last
    expect(report.locator(".llmdebug-answer h2")).to_contain_text("Made in", timeout=1_000_000)
    expect(report.locator(".llmdebug-canvas[aria-busy=false]").first).to_be_visible()
    picture(report.locator(".llmdebug"), f"{engine}_compare_light", 700)
    run = cells.filter(has=page.get_by_role("combobox", name="Request of the engine"))
    if engine == "vllm":  # llama.cpp was given one text
        run.get_by_role("combobox").select_option(index=2)
        for name in ("model", "layers", "1 LlamaDecoderLayer", "self_attn"):
            run.get_by_role("treeitem", name=re.compile(f"^{name}")).first.click()
        run.locator(".llmdebug-record", has_text="o_proj out[0]").click()
        expect(run.locator(".llmdebug-canvas[aria-busy=false]")).to_be_visible()
        picture(run.locator(".llmdebug"), f"{engine}_requests_light")


def themes(page: Page) -> Iterator[str]:
    """Show the page in each theme, and in the light one again at the end."""
    for theme in ("dark", "light"):
        show_theme(page, theme)
        yield theme


def picture(what: Locator, name: str, height: int = 3000) -> None:
    """Write a small PNG of the upper part of the page."""
    what.scroll_into_view_if_needed()
    image = Image.open(io.BytesIO(what.screenshot(animations="disabled"))).convert("RGB")
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{name}.png"
    image = image.crop((0, 0, image.width, min(height, image.height)))
    image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE).save(
        file, optimize=True
    )
    assert file.stat().st_size < LARGEST
