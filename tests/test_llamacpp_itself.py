"""llama.cpp itself is recorded, in a Python of its own: make test-engines."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

import llmdebug_nb as ld
from llmdebug_nb.reference.ggml_calls import FORMULAS

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("LLMDEBUG_LLAMACPP", ROOT / ".venv" / "llamacpp")) / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="llama-cpp-python is not here: make test-engines builds it, apart;"
        " LLMDEBUG_LLAMACPP names another environment",
    ),
]

# as in llamacpp_program.py
OF_ONE_FILE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
KINDS = ["llama", "qwen2", "qwen3", "mixtral", "qwen2moe", "gemma2"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("llamacpp")
    program = ROOT / "tests" / "llamacpp_program.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, program, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_bit_for_bit_the_same(result: dict[str, Any], kind: str) -> None:
    assert result[kind]["same"] is True
    assert result[kind]["problems"] == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_file_is_within_noise_of_transformers(result: dict[str, Any], kind: str) -> None:
    assert result[kind]["verdict"] == "within_noise"
    # what ggml computes together with the product, and cosines and sines, have no tensors
    assert {name.rpartition(".")[2] for name in result[kind]["alone"]} <= {"act_fn", "rotary_emb"}


def test_gelu_from_a_table_is_told(result: dict[str, Any]) -> None:
    assert result["gemma2"]["coarse"] == ["GELU from a table in f16"]
    assert result["llama"]["coarse"] == []


def test_the_rows_are_the_text(result: dict[str, Any]) -> None:
    rows = result["llama"]["rows"]
    assert [position for _, position, _ in rows] == list(range(len(rows)))
    assert [token for _, _, token in rows] == result["llama"]["tokens"]
    assert {request for request, _, _ in rows} == {"0"}


def test_modules_have_the_names_of_their_weights(result: dict[str, Any]) -> None:
    for name in ("token_embd", "blk.3.attn_q", "blk.0.ffn_norm", "output_norm", "output"):
        assert name in result["llama"]["modules"]


def test_an_interrupted_recording_leaves_the_llama_as_it_would_be(result: dict[str, Any]) -> None:
    # 20 tokens lay in the cache as the recording began
    assert result["broken"] == {"bits": True, "context": True, "state": True, "cached": 20}


def test_filters_choose_modules_and_steps(result: dict[str, Any]) -> None:
    found = result["filtered"]
    parts = ("attn_k", "attn_norm", "attn_output", "attn_q", "attn_v")
    assert found["paths"] == [f"blk.2.{part}" for part in parts]
    assert (found["steps"], found["kept"]) == ([1], 0)
    assert "nothing.*" in found["refused"]


def test_a_request_is_recorded_by_its_prompt_and_the_tokens_behind_it(
    result: dict[str, Any],
) -> None:
    # the prompt of 20 tokens comes in three parts; token 2 is the second that was fed behind it
    expected = [["1", position] for position in (*range(20), 21)]
    assert result["by_request"]["rows"] == expected


@pytest.mark.parametrize(
    ("precision", "coarse"),
    [
        ("q8_0", ["weights in q8_0", "cache in f16"]),
        ("f16 flash", ["weights in f16", "cache in f16", "flash attention"]),
    ],
)
def test_a_right_file_of_coarse_weights_is_within_noise_and_says_what_does_not_show(
    result: dict[str, Any], precision: str, coarse: list[str]
) -> None:
    found = result["coarse"][precision]
    assert (found["coarse"], found["verdict"]) == (coarse, "within_noise")
    assert any("smaller bugs do not show" in note for note in found["notes"])


def test_a_wrong_file_of_coarse_weights_is_found(result: dict[str, Any]) -> None:
    found = result["coarse"]["q8_0 wrong"]
    assert found["verdict"] == "diverged"
    assert "layers.1.self_attn" in found["found"][0]
    assert any("the limits know that rounding" in note for note in found["notes"])


def test_rounding_too_coarse_for_limits_is_said(result: dict[str, Any]) -> None:
    found = result["coarse"]["q4_K"]
    assert (found["rounding"], found["verdict"]) == (0.125, "diverged")
    assert any("not what the weights lost" in note for note in found["notes"])


@pytest.mark.parametrize("precision", OF_ONE_FILE)
def test_any_quantised_file_is_within_noise_of_its_own_weights_in_floats(
    result: dict[str, Any], precision: str
) -> None:
    found = result["coarse"][f"{precision} in floats"]
    assert (found["verdict"], found["found"]) == ("within_noise", [])
    assert any("it rounds to 8 bits first; the logits move by" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("bug", "place"),
    [
        ("halved", "layers.1.self_attn"),
        ("tied", "lm_head"),
        ("smoothed", "layers.0.input_layernorm"),
        ("turned", "layers.0.self_attn"),
    ],
)
def test_a_wrong_file_of_4_bits_is_found_beside_its_own_weights_in_floats(
    result: dict[str, Any], bug: str, place: str
) -> None:
    found = result["coarse"][f"q4_K {bug}"]
    assert found["verdict"] == "diverged"
    assert place in found["found"][0]


@pytest.mark.parametrize(
    "precision", ["f32", "f16", "q8_0", "q4_K", "q5_K", "q6_K", "flash", "its file"]
)
def test_each_node_of_a_right_run_is_right_at_the_sharpness_of_float32(
    result: dict[str, Any], precision: str
) -> None:
    found = result["nodes"][precision]
    assert found["wrong"] == []
    assert found["checked"] == found["total"] > 100
    assert found["worst"] < 1e-6


@pytest.mark.parametrize(
    ("architecture", "operations"),
    [
        ("llama", {"ROPE"}),  # with YaRN, and a factor for each frequency
        ("mixtral", {"MUL_MAT_ID", "ARGSORT", "VIEW", "SWIGLU"}),
        ("qwen2moe", {"MUL_MAT_ID", "ARGSORT", "VIEW", "SILU"}),
        ("gemma2", {"GEGLU", "TANH", "SCALE"}),
        ("gpt-oss", {"ADD_ID", "SWIGLU_OAI", "SOFT_MAX"}),
        ("gpt-oss flash", {"ADD_ID", "SWIGLU_OAI", "FLASH_ATTN_EXT"}),
        ("bloom", {"SOFT_MAX", "GELU"}),
        ("bloom flash", {"FLASH_ATTN_EXT", "GELU"}),
    ],
)
def test_each_node_of_other_architectures_is_right(
    result: dict[str, Any], architecture: str, operations: set[str]
) -> None:
    found = result["architectures"][architecture]
    assert found["wrong"] == []
    assert found["checked"] == found["total"] > 90
    assert operations <= set(found["operations"])
    assert found["worst"] < 1e-6


def test_operations_that_few_models_have_are_right_or_have_no_formula(tmp_path: Path) -> None:
    """What `test_ggml_operations.py` reads from a file is computed here."""
    program = ROOT / "tests" / "ggml_graphs.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, program, tmp_path / "ggml.zip"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    names = set(done.stdout.split())
    assert set(FORMULAS) < names  # a formula under a name that ggml has not would never be used
    zipfile.ZipFile(tmp_path / "ggml.zip").extractall(tmp_path)
    result = ld.opcheck(ld.open_run(tmp_path / "ggml"), progress=False, output=tmp_path).result
    assert [str(each) for each in result.wrong] == []
    assert result.checked > 400
    left = {each.op.removeprefix("Ggml.") for each in result.calls if each.reason}
    assert left == {"ROLL", "ROPE"}  # this ROPE has several sections


def test_the_weights_of_another_file_are_named(result: dict[str, Any]) -> None:
    assert result["nodes"]["another file"]["wrong"] == ["blk.1.ffn_up/Ggml.MUL_MAT"]


def test_an_unedited_program_is_recorded_from_its_first_token(
    result: dict[str, Any], tmp_path: Path
) -> None:
    program = tmp_path / "serve.py"
    program.write_text(
        "import hashlib, llama_cpp, sys\n"
        "more = dict(n_ctx=128, logits_all=True, verbose=False, n_threads=1)\n"
        "one = llama_cpp.Llama(sys.argv[1], **more)\n"
        "one.eval(list(range(10, 30)))\n"
        "one.eval([7])\n"
        "print(hashlib.sha1(one.scores[: one.n_tokens].tobytes()).hexdigest())\n"
    )
    plain = [str(PYTHON), str(program), result["llama"]["file"]]
    alone = subprocess.run(plain, capture_output=True, text=True, check=True)
    said: list[str] = []
    done = ld.launch(
        plain, name="served", path=tmp_path, tokens="all", output=lambda _, text: said.append(text)
    )
    assert alone.stdout in "".join(said)  # the same logits
    assert "can't record" not in "".join(said)
    run = done.run
    assert {record.site.step for record in run.records()} == {0, 1}
    assert run.rows()["position"].tolist() == list(range(21))
