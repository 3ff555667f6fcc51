"""A newcomer's journey in a real JupyterLab: from "the port differs" to the open line."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from lab_server import Lab

PORT = '''"""A port of a Llama whose MLP has another activation."""

from torch import nn
from torch.nn.functional import gelu


class FastMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x):
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        hidden = gelu(gate) * up
        return self.down_proj(hidden)


def ported(model):
    for layer in model.model.layers:
        layer.mlp = FastMLP(layer.mlp)
    return model
'''
WRONG = PORT.splitlines().index("        hidden = gelu(gate) * up") + 1
BEFORE = (  # what a user has before llmdebug: a model, and a port that gives other numbers
    "import copy, torch\nfrom models import llama, prompt\nfrom my_port import ported\n"
    "model = llama(); port = ported(copy.deepcopy(model)); ids = prompt()\n"
    "torch.equal(model(ids).logits, port(ids).logits)"
)
STEPS = (
    "%load_ext llmdebug_nb",
    "%%llmdump model --name golden\nmodel(ids);",
    "%%llmdump port --name mine\nport(ids);",
    "%llmcompare golden mine",
)
MOST_CELLS, MOST_CLICKS = 4, 3
COUNT_CLICKS = """() => {
  window.clicks = 0;
  document.addEventListener('click', event => { if (event.isTrusted) window.clicks++; }, true);
}"""


@pytest.mark.parametrize(
    ("recorded", "clicks"),
    [("", ("Look inside", "Open line")), (" --mode module+api", ("Open line",))],
)
def test_from_the_port_differs_to_the_open_line_in_four_cells_and_three_clicks(
    lab: Lab, page: Page, recorded: str, clicks: tuple[str, ...]
) -> None:
    (lab.root / "my_port.py").write_text(PORT, encoding="utf-8")
    name = f"newcomer{len(clicks)}.ipynb"
    cells = [STEPS[0], *(step.replace(" --name", f"{recorded} --name") for step in STEPS[1:])]
    lab.open(page, lab.write_notebook(name, BEFORE, *cells))
    lab.run_cell(page, 0)
    expect(lab.finished(page, 0)).to_contain_text("False")  # the port differs

    for index in range(1, 1 + len(cells)):
        lab.run_cell(page, index)
    answer = page.locator(".llmdebug-answer")
    expect(answer.locator("h2")).to_contain_text("Made in my_port.py", timeout=60_000)
    page.evaluate(COUNT_CLICKS)
    for face in clicks:
        answer.get_by_role("button", name=face).click()
        expect(answer.locator("h2")).to_contain_text(f"my_port.py:{WRONG}", timeout=60_000)
    expect(page.locator(".jp-FileEditor")).to_contain_text("gelu(gate) * up", timeout=60_000)
    expect(page.get_by_text(re.compile(rf"^Ln {WRONG},"))).to_be_visible()

    assert len(cells) <= MOST_CELLS
    assert page.evaluate("window.clicks") == len(clicks) <= MOST_CLICKS
