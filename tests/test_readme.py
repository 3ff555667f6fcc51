"""The commands and code of the README, run as a reader would run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from llmdebug_nb.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
MODELS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = LlamaForCausalLM(config).eval()
port = LlamaForCausalLM(config).eval()
port.load_state_dict(model.state_dict())
port.model.layers[1].mlp.act_fn = torch.nn.GELU()
inputs = {"input_ids": torch.tensor([[5, 7, 9]])}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMDEBUG_RUNS", raising=False)
    return tmp_path


def test_the_python_and_then_the_shell_lines_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(MODELS, names)
    for block in blocks("python"):
        exec(block, names)
    assert names["report"].verdict == "diverged"
    assert names["report"].findings[0].path == "model.layers.1.mlp.act_fn"
    assert (workplace / "report.html").is_file()

    lines = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("llmdebug ")
    ]
    assert len(lines) == 4
    for line in lines:
        capsys.readouterr()
        status = main(shlex.split(line, comments=True)[1:])
        assert status == (1 if " compare " in line else 0), line
        assert capsys.readouterr().out
    assert (workplace / "differences.csv").is_file()


@pytest.mark.slow
def test_the_notebook_cells_run(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    cells = blocks("ipython")
    assert len(cells) == 5
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (MODELS, *cells)]
    )
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=120,
        resources={"metadata": {"path": str(workplace)}},
    )
    client.execute()
    assert (workplace / "report.html").is_file()
    assert (workplace / "llmdebug_runs" / "golden").is_dir()


def test_files_named_in_the_readme_exist() -> None:
    root = Path(__file__).parent.parent
    for place in re.findall(r"\]\(([A-Za-z0-9_./-]+)\)", README):
        assert (root / place).exists(), place
    targets = set(
        re.findall(r"^([a-z]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert (
        set(
            re.findall(
                r"`?make ([a-z]+)", "\n".join(re.findall(r"`[^`]+`|^make.*", README, re.MULTILINE))
            )
        )
        <= targets
    )
