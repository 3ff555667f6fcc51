"""Operations that ggml itself computed, in a recording of `ggml_graphs.py`: what opcheck says of
them, and what each is by its definition.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import ggml_by_hand as by_hand
import llmdebug_nb as ld
from llmdebug_nb.core.records import Record
from llmdebug_nb.reference import ggml_calls
from llmdebug_nb.replay.checks import UNKNOWN

TOKENS = ([3, 1, 4], [3])  # of the two steps
# coarse: halves, or integers in blocks; the others are float32
TOLERANCES = {"f16": 2e-3, "q8_0": 2e-2, "geglu": 2e-3, "flash": 2e-3}
FINE = ("geglu_erf", "flash_f32", "flash_all", "soft_max")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ld.Run:
    folder = tmp_path_factory.mktemp("ggml")
    zipfile.ZipFile(Path(__file__).parent / "data" / "ggml.zip").extractall(folder)
    return ld.open_run(folder / "ggml")


def names(run: ld.Run, step: int) -> dict[tuple[str, int], str]:
    """Return the name of the case of each node, by path and call."""
    rows = run.scalars().query(f"role == 'ggml' and slot == 'name' and step == {step}")
    texts = zip(rows["path"], rows["call"], rows["value"], strict=True)
    return {(path, call): text.rpartition("-")[0] for path, call, text in texts if "-" in text}


def outputs(run: ld.Run, step: int) -> dict[str, Record]:
    records = run.records(step=step, role="output")
    found = {(each.site.path, each.site.call): each for each in records}
    return {case: found[at] for at, case in names(run, step).items()}


def wrong(run: ld.Run, operations: set[str], tmp_path: Path) -> set[str]:
    """Return the cases of some operations that opcheck says are wrong in the first step."""
    check = ld.opcheck(run, names=sorted(operations), progress=False, output=tmp_path)
    found = {(each.key.path, each.key.call) for each in check.wrong if each.key.step == 0}
    return {case for at, case in names(run, 0).items() if at in found}


def weights(run: ld.Run) -> dict[str, np.ndarray]:
    return {each.site.path: run.load(each).numpy() for each in run.records(role="weight")}


def test_what_ggml_computed_is_right_and_what_has_no_formula_is_named(
    run: ld.Run, tmp_path: Path
) -> None:
    result = ld.opcheck(run, progress=False, output=tmp_path).result
    assert [str(each) for each in result.wrong] == []
    assert result.checked > 400
    assert result.checked + sum(result.not_checked.values()) == result.total
    left = {(each.op, each.reason, each.detail) for each in result.calls if each.reason}
    assert left == {
        ("Ggml.ROLL", UNKNOWN, "no formula of Ggml.ROLL is known"),
        ("Ggml.ROPE", UNKNOWN, "no formula for mode=8 is known"),
    }


@pytest.mark.parametrize("case", by_hand.CASES)
@pytest.mark.parametrize("step", [0, 1])
def test_what_ggml_computed_is_what_the_operation_is_by_its_definition(
    run: ld.Run, case: str, step: int
) -> None:
    found = run.load(outputs(run, step)[case]).double().numpy()
    expected = by_hand.CASES[case](by_hand.Text(weights(run), TOKENS[step]))
    found = found.reshape(expected.shape)
    if case == "top_k":  # in any order
        found, expected = np.sort(found), np.sort(expected)
    coarse = [size for part, size in TOLERANCES.items() if part in case]
    limit = 1e-5 if not coarse or case.startswith(FINE) else max(coarse)
    assert np.linalg.norm(found - expected) <= limit * np.linalg.norm(expected)


ALIBI = {"soft_max_alibi", "soft_max_alibi_sinks", "flash_alibi", "flash_all"}
YARN = {"rope_yarn", "rope_yarn_halves", "rope_yarn_part", "rope_factors_yarn"}

ROPE = {case for case in by_hand.CASES if case.startswith("rope")}


@pytest.mark.parametrize(
    ("parameter", "factor", "cases"),
    [
        ("max_bias", 2, ALIBI),
        ("logit_softcap", 1.05, {"flash_cap", "flash_all"}),
        ("ext_factor", 0.99, YARN),
        ("attn_factor", 1.001, ROPE),
        ("beta_fast", 4.0, {"rope_yarn_halves"}),
        ("beta_slow", 4.0, YARN),
        ("n_ctx_orig", 4, YARN),
        ("limit", 1.01, {"swiglu_oai", "swiglu_clamp"}),
        ("alpha", 1.01, {"swiglu_oai"}),
        ("alpha_n", 1.01, {"xielu", "xielu_small"}),
        ("n_offs", 2, {"rope_offset"}),
        ("n_groups", 2, {"group_norm"}),
    ],
)
def test_another_parameter_than_the_one_that_ran_makes_just_its_operations_wrong(
    run: ld.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    parameter: str, factor: float, cases: set[str],
) -> None:  # fmt: skip
    read = ggml_calls.numbers

    def changed(scalars: Mapping[str, tuple[str, str | None]]) -> dict[str, float]:
        found = read(scalars)
        return found | {name: found[name] * factor for name in found if name == parameter}

    monkeypatch.setattr(ggml_calls, "numbers", changed)
    operations = {outputs(run, 0)[case].op for case in cases}
    assert wrong(run, operations, tmp_path) == cases
