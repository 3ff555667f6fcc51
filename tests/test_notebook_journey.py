"""The main job in a real browser: record, compare, find the planted bug, look at it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from browser import click_value
from lab_server import Lab

SCREENSHOTS = Path(__file__).parent.parent / "out"
CELLS = (
    "%load_ext llmdebug_nb\n"
    "import copy, torch, llmdebug_nb as ld\n"
    "from models import generate, llama, prompt\n"
    "model = llama(); broken = copy.deepcopy(model)\n"
    "broken.model.layers[1].mlp.act_fn = torch.nn.GELU()",
    "%%llmdump model --tokens 0-3 --name golden\nids = generate(model, new=5)\nids.shape",
    "%%llmdump --tokens 0-3 --name mine\ngenerate(broken, ids[:, :7], new=5).shape",
    "report = %llmcompare golden mine",
    "explorer = ld.explore(report); explorer",
    "%llmexplore golden",
    "%%llmdump model --layers nowhere\ngenerate(model)",
)


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_newcomer_finds_the_planted_bug(lab: Lab, page: Page, app: str) -> None:
    outside: list[str] = []
    page.on(
        "request", lambda request: None if _ours(request.url, lab) else outside.append(request.url)
    )
    notebook = lab.write_notebook(f"journey_{app}.ipynb", *CELLS)
    lab.open(page, notebook, app)
    cells = page.locator(".jp-Notebook .jp-CodeCell")

    for index in range(4):
        lab.run_cell(page, index)
    recorded = cells.nth(1).locator(".jp-OutputArea")
    expect(recorded).to_contain_text("golden: 320 tensors of 4 steps", timeout=60_000)
    expect(recorded).to_contain_text("torch.Size([1, 12])")
    expect(cells.nth(3).locator(".jp-OutputArea")).to_contain_text(
        "diverged. Made in", timeout=60_000
    )
    expect(cells.nth(3).locator("h2")).to_contain_text("model.layers.1.mlp.act_fn")

    lab.run_cell(page, 4)
    explorer = cells.nth(4)
    explorer.get_by_role("button", name="Records and model tree").click(timeout=60_000)
    explorer.locator(".llmdebug-time-names span", has_text="1 decode").click()
    expect(explorer.locator(".llmdebug-time-now")).to_have_text("1 decode")
    lab.kernel_comes_to(notebook, "explorer.position", "1")
    for name in ("model", "layers", "1 LlamaDecoderLayer", "mlp LlamaMLP"):
        explorer.get_by_role("treeitem", name=re.compile(f"^{name}")).first.click()
    expect(explorer.get_by_role("treeitem", name=re.compile("act_fn"))).to_be_visible()
    lab.kernel_comes_to(notebook, "explorer.path", "'model.layers.1.mlp'")
    expect(explorer.locator(".llmdebug-record", has_text="layernorm")).to_have_count(0)
    explorer.locator(".llmdebug-record", has_text="act_fn out[0]").click()
    expect(explorer.locator(".llmdebug-place")).to_contain_text("model.layers.1.mlp.act_fn")
    site = "report.differences[explorer.selected].site"
    lab.kernel_comes_to(notebook, f"({site}.path, {site}.step)", "('model.layers.1.mlp.act_fn', 1)")
    explorer.get_by_role("tab", name="Difference").click()
    click_value(explorer, r"\[0, 0, \d+\] = ")
    SCREENSHOTS.mkdir(exist_ok=True)
    explorer.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / f"journey_{app}.png")

    lab.run_cell(page, 5)
    expect(cells.nth(5).locator(".llmdebug-total")).to_contain_text("80 records", timeout=60_000)
    lab.run_cell(page, 6)
    error = cells.nth(6).locator(".jp-OutputArea")
    expect(error).to_contain_text("layers 'nowhere' matches none", timeout=60_000)
    expect(error).not_to_contain_text("Traceback")
    assert outside == []


def _ours(url: str, lab: Lab) -> bool:
    return url.startswith((lab.url, lab.url.replace("http", "ws"), "data:", "blob:"))
