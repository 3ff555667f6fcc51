"""The zoo: bugs and benign changes work as described, and the scorer is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from zoo import score
from zoo.entry import Answer, Case, Seen, answers
from zoo.sets import SETS

ENTRIES = {entry.number: entry for entries in SETS.values() for entry in entries}
SCALE = Case(ENTRIES["8"], "llama", "fp32", 0)
RIGHT = Seen(
    "model.layers.1.self_attn/Tensor.mul", functions=frozenset({"eager_attention_forward"})
)
ANSWER = Answer.at("model.layers.1.self_attn/Tensor.mul@eager_attention_forward")


@pytest.mark.slow
def test_a_planted_bug_is_found_and_an_equal_program_raises_no_alarm() -> None:
    found = {mark.tool: mark for mark in score.score(SCALE)}
    assert found[score.OURS].exact
    assert found[score.OURS].step
    assert not found[score.OURS].silent
    assert not any(mark.alarm for mark in score.score(Case(ENTRIES["C0"], "llama", "fp32", 0)))


@pytest.mark.parametrize(
    ("number", "architecture", "precision", "seed"),
    [
        ("22", "qwen2", "bf16", 0),
            # first seen in a step in which no call's output differs beyond noise
        ("28b", "llama", "bf16", 0),  # casts have gradients of their own
        ("M6", "gpt_neox", "bf16", 0),
            # a mode that one side leaves at its default, and noise hides
        ("M8", "gpt_neox", "bf16", 0),
            # a cast gives what it is given, and no operator is taken for one
        ("13", "mixtral", "bf16", 2),
            # behind another choice of experts, where no value can be judged
        ("M5", "mistral", "bf16", 2),  # a cast that only one side makes is not what is wrong
        ("3", "llama", "bf16", 0),  # a cast that does lose something
        ("M14", "olmo2", "fp32", 0),  # what only moves elements has the norm of what it is given
        ("P1", "llama", "bf16", 0),  # a module written anew takes other arguments
        ("P2", "llama", "bf16", 0),  # eps by another name
        ("P4", "llama", "bf16", 0),  # what agrees around it leaves one operator of mine
    ],
)  # fmt: skip
def test_bugs_that_rounding_or_a_rewrite_hides_are_named(
    number, architecture, precision, seed
) -> None:
    ours = score.score(Case(ENTRIES[number], architecture, precision, seed))[0]
    assert ours.exact, ours.blamed
    assert ours.step, ours.blamed
    assert not ours.silent


@pytest.mark.parametrize(
    ("number", "architecture", "precision", "seed"),
    [
        ("C1", "phi3", "bf16/bf16", 0),  # operands in another order
        ("P0", "llama", "bf16", 0),  # tensors that lie in another order
        ("D6", "olmo2", "bf16", 0),  # other operators to the same end
        ("D5", "qwen3", "bf16", 0),  # a product, and its cast
        ("D3", "qwen2_moe", "fp32", 2),  # a single element whose terms cancel
    ],
)  # fmt: skip
def test_what_is_the_same_in_other_words_raises_no_alarm(
    number, architecture, precision, seed
) -> None:
    ours = score.score(Case(ENTRIES[number], architecture, precision, seed))[0]
    assert not ours.alarm, ours.blamed


def test_a_right_answer_counts_and_a_wrong_one_does_not() -> None:
    def marked(verdict: str, *seen: Seen) -> list[bool]:
        mark = score.mark(SCALE, ANSWER, "", verdict, list(seen))
        return [mark.exact, mark.top3, mark.module, mark.step, mark.silent]

    assert marked("diverged", RIGHT) == [True, True, True, True, False]
    other_module = RIGHT._replace(path="model.layers.2.mlp", step=1)
    assert marked("diverged", other_module, RIGHT) == [False, True, False, False, False]
    assert marked("within_noise") == [False, False, False, False, True]


def test_the_fourth_finding_does_not_count() -> None:
    other = RIGHT._replace(path="lm_head")
    assert not score.mark(SCALE, ANSWER, "", "diverged", [other, other, other, RIGHT]).top3


def test_blame_in_the_right_module_but_at_another_operator_is_no_exact_hit() -> None:
    rotary = RIGHT._replace(functions=frozenset({"apply_rotary_pos_emb"}))
    found = score.mark(SCALE, ANSWER, "", "diverged", [rotary])
    assert (found.exact, found.module) == (False, True)


@pytest.mark.parametrize("verdict", ["diverged", "failed"])
def test_any_other_verdict_on_a_control_is_a_false_alarm(verdict: str) -> None:
    control = Case(ENTRIES["C5"], "llama", "bf16", 0)
    assert score.mark(control, Answer(), "", verdict, []).alarm
    assert score.mark(control, Answer(), "", "within_noise", [RIGHT]).alarm
    assert not score.mark(control, Answer(), "", "within_noise", []).alarm


def test_a_backward_answer_is_no_forward_step() -> None:
    assert not Answer.at("model.norm", phase="backward").is_step(Seen("model.norm"))


@pytest.mark.parametrize(
    ("target", "hit"),
    [
        ("a/Tensor.*", True),
        ("a/Tensor.mul#1", True),
        ("a/Tensor.mul#0", False),
        ("a/Tensor.mul@g", False),
        ("a", False),
    ],
)
def test_a_target_names_a_path_a_call_or_a_function(target: str, hit: bool) -> None:
    assert (
        answers(target, Seen("a/Tensor.mul", calls=frozenset({1}), functions=frozenset({"f"})))
        is hit
    )


def logits(program: object) -> torch.Tensor:
    kept = []
    program.model.register_forward_hook(lambda *call: kept.append(call[-1].logits))
    program()
    return torch.cat([part.float().flatten() for part in kept])


@pytest.mark.parametrize("number", ["13", "C6", "P0"])
def test_golden_and_mine_are_the_same_model_but_for_what_is_planted(number: str) -> None:
    case = Case(ENTRIES[number], "llama", "fp32", 0)
    a, b = logits(case.golden()), logits(case.mine()[0])
    assert case.entry.benign or not torch.equal(a, b)
    assert torch.allclose(a, b, atol=1e-5 if case.entry.benign else 1e-2)


def test_the_table_counts_bugs_and_controls_apart() -> None:
    right = score.mark(SCALE, ANSWER, score.OURS, "diverged", [RIGHT])
    alarm = score.mark(
        Case(ENTRIES["C0"], "llama", "fp32", 0), Answer(), score.OURS, "diverged", [RIGHT]
    )
    total = score.table([right, alarm]).splitlines()[-1].split("|")
    assert total[1:9] == ["**llmdebug_nb**", "2", "1/1", "1/1", "1/1", "1/1", "0/1", "1/1"]
