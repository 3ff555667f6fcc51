"""vLLM itself is recorded, in a Python of its own: make test-engines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import llmdebug_nb as ld
from vllm_program import PROMPTS

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("LLMDEBUG_ENGINES", ROOT / ".venv" / "engines")) / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # vLLM takes a minute to import, and ten on a busy machine
    pytest.mark.skipif(
        not PYTHON.exists(), reason="vLLM is not here: make test-engines installs it, apart"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(folder: Path, result: dict[str, object]) -> Path:
    """Return the checkpoint that the first program has made."""
    return folder / "model"


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, object]:
    program = ROOT / "tests" / "vllm_program.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, program, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


def test_tokens_and_log_probabilities_stay_bit_for_bit_the_same(
    result: dict[str, object],
) -> None:
    assert result["same"] is True
    assert result["problems"] == {}


def test_the_rows_are_the_prompts_and_their_outputs(result: dict[str, object]) -> None:
    texts: dict[str, dict[int, int]] = {}
    for request, position, token in result["rows"]:  # type: ignore[attr-defined]
        assert position not in texts.setdefault(request, {})
        texts[request][position] = token
    found = [[text[at] for at in range(len(text))] for text in texts.values()]
    # the last token that was sampled is fed to no step
    expected = [
        prompt + tokens[:-1]
        for prompt, tokens in zip(PROMPTS, result["tokens"], strict=True)  # type: ignore[call-overload]
    ]
    assert sorted(found) == sorted(expected)


def test_the_modules_of_each_layer_are_recorded(result: dict[str, object]) -> None:
    for name in ("self_attn.qkv_proj", "self_attn.attn", "self_attn.o_proj", "mlp.down_proj"):
        assert f"model.layers.1.{name}" in result["modules"]  # type: ignore[operator]
    assert "logits_processor" in result["modules"]  # type: ignore[operator]


@pytest.mark.parametrize(
    "program", ["vllm_offline.py", "vllm_async.py", "-E vllm_offline.py"], ids=str
)
def test_an_unedited_program_is_recorded_in_the_engines_own_process(
    program: str, result: dict[str, object], model: Path, tmp_path: Path
) -> None:
    """With -E, Python ignores PYTHONPATH: vLLM's plugins reach the engine."""
    *flags, name = program.split()
    command = f"{PYTHON} {' '.join(flags)} {ROOT / 'tests' / name} {model}"
    dump = [PYTHON, "-m", "llmdebug_nb.cli", "dump", "--name", "mine", "--path", tmp_path]
    done = subprocess.run(
        [*dump, "--tokens", "all", "--exec", command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = ld.open_run(tmp_path / "mine")
    assert run.source.complete
    rows = run.rows()
    texts = [part["token"].tolist() for _, part in rows.groupby("request")]
    tokens: list[list[int]] = result["tokens"]  # type: ignore[assignment]
    expected = [prompt + more[:-1] for prompt, more in zip(PROMPTS, tokens, strict=True)]
    assert sorted(texts) == sorted(expected)


@pytest.fixture(scope="module")
def compiled(folder: Path, model: Path) -> dict[str, dict[str, object]]:
    """Return what `vllm_compiled_program.py` says: the engine is made as vLLM's default has it."""
    program = ROOT / "tests" / "vllm_compiled_program.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [PYTHON, program, folder, model], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, object]] = json.loads((folder / "compiled.json").read_text())
    return found


def test_of_a_compiled_engine_the_modules_outside_are_recorded_and_a_note_says_what_to_do(
    compiled: dict[str, dict[str, object]],
) -> None:
    found = compiled["outside"]
    assert (found["same"], found["problems"]) == (True, {})
    assert found["paths"] == ["", "logits_processor"]
    (note,) = found["notes"]  # type: ignore[misc]
    assert "force_eager=True" in note
    assert "graph='fused'" in note


def test_the_kernels_of_a_compiled_engine_are_recorded_bit_for_bit(
    folder: Path, compiled: dict[str, dict[str, object]]
) -> None:
    found = compiled["both"]
    assert (found["same"], found["problems"], found["notes"]) == (True, {}, [])
    assert "model.layers.1.mlp.act_fn/Aten.mul.Tensor" in found["paths"]  # type: ignore[operator]
    assert compiled["again"] is True  # its own compiled code runs again
    check = compiled["opcheck"]
    assert check["wrong"] == []
    assert check["checked"] > 0  # type: ignore[operator]
    golden, kernels = ld.open_run(folder / "golden"), ld.open_run(folder / "kernels")
    for first in (golden, ld.open_run(folder / "eager"), ld.open_run(folder / "kernels.fx")):
        report = ld.compare(first, kernels, progress=False)
        assert (report.verdict, report.findings) == ("within_noise", [])


def test_a_compiled_engine_runs_its_modules_with_force_eager(
    compiled: dict[str, dict[str, object]],
) -> None:
    found = compiled["eager"]
    assert (found["tokens"], found["problems"], found["notes"]) == (True, {}, [])
    assert "model.layers.1.mlp.down_proj" in found["paths"]  # type: ignore[operator]


def test_two_workers_that_share_the_model_are_two_ranks_and_agree_with_transformers(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    command = f"{PYTHON} {ROOT / 'tests' / 'vllm_offline.py'} {model} 2"
    dump = [PYTHON, "-m", "llmdebug_nb.cli", "dump", "--name", "mine", "--path", tmp_path]
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [*dump, "--tokens", "all", "--exec", command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    golden, mine = ld.open_run(folder / "golden"), ld.open_run(tmp_path / "mine")
    assert mine.source.complete
    assert mine.info()["ranks"] == [0, 1]
    report = ld.compare(golden, mine, progress=False)
    assert (report.verdict, report.findings) == ("within_noise", [])
    assert ld.logits(golden, mine, progress=False).verdict == "pass"
