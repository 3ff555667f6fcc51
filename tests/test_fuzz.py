"""Seeded mutations of dumps, documents and messages; `fuzz.py` says what may happen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fuzz
import fuzz_guard
import llmdebug_nb as ld
from fuzz_targets import HEAVY, LIGHT, MutatedDump
from llmdebug_nb.align import names
from llmdebug_nb.capture import control_file
from llmdebug_nb.notebook.bridge import BadRequestError, check_request
from llmdebug_nb.show import tensors

LIGHT_SECONDS, HEAVY_SECONDS = 1.5, 4.0  # of each target: a minute in all


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    with fuzz.prepared(tmp_path_factory.mktemp("fuzz")) as both:
        yield both


@pytest.mark.slow
@pytest.mark.parametrize("target", [*LIGHT, *sorted(HEAVY)])
def test_mutations_raise_nothing_but_our_own_errors(prepared, target):
    corpus, scratch = prepared
    case, outcomes = corpus.targets[target], Counter[str]()
    end = time.monotonic() + (HEAVY_SECONDS if target in HEAVY else LIGHT_SECONDS)
    seed = 0
    while time.monotonic() < end:
        outcome, trace = fuzz.outcome_of(target, case, seed, scratch)
        assert fuzz.is_fine(outcome), f"{target}:{seed} {outcome}\n{trace}"
        outcomes[outcome] += 1
        seed += 1
    assert outcomes["ok"] + outcomes["refused"] > 0


@pytest.mark.parametrize(
    "code",
    [
        "open('/tmp/outside-of-the-case', 'w')",
        "import os; os.system('true')",
        "import os; os.remove('../elsewhere')",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
    ],
)
def test_what_leaves_the_folder_is_noticed(prepared, code):
    _, scratch = prepared

    def case(rng, work: Path) -> None:
        with fuzz_guard.guarded(work):
            exec(code)

    outcome, _ = fuzz.outcome_of("escape", case, 0, scratch)
    assert outcome.startswith("Escape"), outcome
    assert not os.path.exists("/tmp/outside-of-the-case")


def test_a_case_is_the_same_each_time(prepared):
    corpus, scratch = prepared
    seen = [
        [fuzz.outcome_of(target, corpus.targets[target], seed, scratch)[0] for seed in range(20)]
        for target in ("frames", "frames")
    ]
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 2


@pytest.mark.slow
def test_the_loop_counts_and_goes_on_where_it_stopped(tmp_path):
    command = [sys.executable, fuzz.__file__, "--seconds", "1", "--targets", "shape", "--out"]
    for _ in range(2):
        out = subprocess.run(
            [*command, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path
        )  # the folder of the guarded cases may be gone
        assert out.returncode == 0, out.stdout + out.stderr
    assert "0 of them findings" in out.stdout
    assert fuzz._read(tmp_path)["next"]["shape"] >= 600


# -- what it found ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [[1.0, 1.0 + 2**-52], [1.0], [-1.7e308, 1.7e308], [0.0, 5e-324], [float("nan")], []],
)
def test_a_histogram_counts_every_finite_value_however_close_they_lie(values):
    found = tensors.histogram(np.array(values), 64)
    assert sum(found["counts"]) == sum(map(np.isfinite, values))


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "9" * 9000])
def test_a_control_file_and_a_mapping_of_nonsense_are_our_errors(tmp_path, text):
    file = tmp_path / "map.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ld.LLMDebugError):
        control_file.read_settings(text)
    with pytest.raises(ld.LLMDebugError):
        names.read(file)


_SURROGATE = {"op": "histogram", "row": 1, "which": "\ud800", "bins": 3}


@pytest.mark.parametrize("message", [{"op": [[[]]]}, {"op": "\ud800"}, _SURROGATE])
def test_a_message_of_nonsense_is_our_error(message):
    with pytest.raises(BadRequestError):
        check_request(message)


def test_a_case_that_is_slow_only_the_first_time_is_not_slow(prepared, monkeypatch):
    _, scratch = prepared
    calls = []

    def case(rng, work):
        calls.append(work)
        end = time.process_time() + (0.3 if len(calls) == 1 else 0.0)
        while time.process_time() < end:
            pass

    monkeypatch.setattr(fuzz, "SLOW", 0.1)
    assert fuzz.outcome_of("cold", case, 0, scratch)[0] == "ok"
    assert len(calls) == 2


@pytest.mark.parametrize(("sound", "slow"), [(0.0, True), (0.5, False)])
def test_a_dump_is_slow_if_it_takes_longer_than_the_same_tour_of_a_sound_one(
    prepared, monkeypatch, sound, slow
):
    def burn(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    class Case(MutatedDump):
        def __call__(self, rng, work):
            burn(0.3)

        def sound(self, rng, work):
            burn(sound)

    monkeypatch.setattr(fuzz, "SLOW", 0.1)
    corpus, scratch = prepared
    outcome, _ = fuzz.outcome_of("processes", Case(corpus.home, "processes"), 0, scratch)
    assert outcome == ("slow (ok)" if slow else "ok")
