"""A program that says how finely it computes is judged by that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.capture.engines.ggml_rounding import epsilon_of, half_precision
from llmdebug_nb.comparison import engine
from llmdebug_nb.comparison.differences import Verdict
from llmdebug_nb.comparison.epsilons import Stated, says, told
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_integers_of_a_block_are_an_epsilon_apart(bits: int) -> None:
    # independent: symmetric integers of so many bits, scaled to the largest of a block of 32
    block = np.random.default_rng(0).normal(size=(1000, 32))
    largest = np.abs(block).max(1, keepdims=True)
    step = largest / 2 ** (bits - 1)
    error = np.abs(np.round(block / step) * step - block).max(1, keepdims=True) / largest
    eps = epsilon_of(f"q{bits}_K")
    assert 0.4 * eps < error.max() <= 0.5 * eps * (1 + 1e-9)


def test_floats_have_the_epsilon_of_their_dtype() -> None:
    assert epsilon_of("f16") == epsilon("float16") == 2.0**-10
    assert epsilon_of("f32") == epsilon("float32")


def test_operations_that_round_to_half_precision_are_told_once() -> None:
    said = half_precision(["MUL_MAT", "GEGLU", "FLASH_ATTN_EXT", "GEGLU", "GELU"])
    assert said == ["GELU from a table in f16", "flash attention"]
    # these are computed, not looked up
    assert half_precision(["SWIGLU", "GEGLU_ERF", "GELU_ERF", "SILU"]) == []


@given(st.text(max_size=12))
def test_unknown_types_state_nothing(kind: str) -> None:
    assert epsilon_of(kind) == 0.0 or kind[:1] in "fbiqQI"


def test_an_epsilon_coarser_than_bfloat16_judges_nothing() -> None:
    assert [told(epsilon_of(kind)) for kind in ("f16", "bf16", "q8_0")] == [2**-10, 2**-7, 2**-7]
    assert [told(epsilon_of(kind)) for kind in ("q6_K", "q5_K", "q4_K", "q2_K")] == [0.0] * 4


@pytest.mark.parametrize(
    ("verdict", "stated", "words"),
    [
        ("within_noise", 2.0**-7, "errors up to 0.08, so smaller bugs do not show"),
        ("diverged", 2.0**-7, "findings are beyond it"),
        ("diverged", 2.0**-3, "llmdebug opcheck on a run with weights=True"),
        ("within_noise", 2.0**-3, ""),
        ("match", 2.0**-7, ""),
    ],
)
def test_a_report_says_what_coarse_rounding_hides(
    verdict: Verdict, stated: float, words: str
) -> None:
    said = says("mine", Stated(["weights in q8_0"], stated), verdict, 0.08)
    assert words in said
    assert bool(said) == bool(words)
    assert not said or said.startswith("mine computes with weights in q8_0: ")


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("within_noise", "rounds to 8 bits first; the logits move by 0.07 (relative L2);"),
        (
            "diverged",
            "unless golden has this file's weights (gguf_file= of Transformers), findings",
        ),
    ],
)
def test_a_report_says_that_factors_are_rounded(verdict: Verdict, words: str) -> None:
    stated = Stated(["weights in q4_1"], 2.0**-3, 2.0**-10, {"a": "q4_1"})
    assert words in says("mine", stated, verdict, 0.5, 0.07)


def test_weights_too_coarse_to_judge_by_leave_what_else_is_stated() -> None:
    assert Stated([], 2.0**-3, 2.0**-10).told == 2.0**-10
    assert Stated([], 2.0**-3, 2.0**-3).told == 0.0
    assert Stated([], 2.0**-7, 2.0**-10).told == 2.0**-7
    assert Stated([], 2.0**-3, 0.0, {"a": "q4_1"}).of_matches == 2.0**-7
    assert Stated([], 0.0, 0.0, {"a": "f32"}).of_matches == 0.0


@pytest.mark.parametrize(
    ("stated", "verdict"), [(0.0, "diverged"), (2.0**-7, "within_noise"), (2.0**-10, "diverged")]
)
def test_an_error_is_noise_if_the_program_said_that_it_rounds_so(
    stated: float, verdict: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    golden = torch.randn(64, 64, generator=generator)
    mine = golden + 0.005 * torch.randn(64, 64, generator=generator)
    records = [
        Record(0, Site("layer"), 0, "Linear", summarize(values)) for values in (golden, mine)
    ]
    records = [
        Record(r.id, r.site, r.seq, r.op, r.summary, payload=at) for at, r in enumerate(records)
    ]
    judging = engine.judging(
        [Pair(records[0], records[1], "")], lambda r: golden, lambda r: mine,
        rounding=(0.0, stated),
    )  # fmt: skip
    assert [each.verdict for each in judging.plain] == [verdict]
