"""Requests of an engine are selected by number or id, and their tokens count as in generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from fake_vllm import LLM, Cached, New, Runner, Scheduled, Whole, installed, served
from llmdebug_nb.capture.request_filter import Part, RequestFilter
from llmdebug_nb.core.errors import EmptyDumpError, OptionError
from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.records import RootCall
from llmdebug_nb.core.requests import RequestSet
from llmdebug_nb.store.run import Run


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def one_after_another() -> list[Scheduled]:
    """Return the steps of three requests that never share one; the second has two chunks."""
    return [
        Scheduled({"a-00000001": 2}, [New("a-00000001", [1, 2])]),
        Scheduled({"a-00000001": 1}, [], Cached(["a-00000001"], [2])),
        Scheduled({"b-0000000f": 2}, [New("b-0000000f", [3, 4, 5])]),
        Scheduled({"b-0000000f": 1}, [], Cached(["b-0000000f"], [2])),
        Scheduled({"b-0000000f": 1}, [], Cached(["b-0000000f"], [3])),
        Scheduled({"c": 1}, [New("c", [9])]),
    ]


def recorded(tmp_path: Path, steps: list[Scheduled], **options: object) -> Run:
    llm = LLM(Runner())
    with ld.dump(llm, name="engine", path=tmp_path, **options) as run:
        llm.generate(steps)
    return run


def steps_of(run: Run) -> list[int]:
    return sorted({record.site.step for record in run.records()})


@pytest.mark.parametrize(
    ("requests", "tokens", "expected"),
    [
        (1, "all", [2, 3, 4]),
        ("1", "0", [2, 3]),  # both chunks of the prompt
        ("1-", "1", [4]),
        ("a", "all", [0, 1]),
        ("a-00000001", "1", [1]),
        ("[ab]*,c", "0", [0, 2, 3, 5]),
        ([0, "c"], "all", [0, 1, 5]),
    ],
)
def test_only_steps_of_the_requests_are_recorded(
    requests: object, tokens: str, expected: list[int], tmp_path: Path
) -> None:
    run = recorded(tmp_path, one_after_another(), requests=requests, tokens=tokens)
    assert steps_of(run) == expected
    assert set(run.rows()["step"]) == set(range(6))  # every step has its rows
    assert not [note for note in run.meta["notes"] if "requests" in note]


def test_logits_of_a_step_are_recorded_with_it(tmp_path: Path) -> None:
    run = recorded(tmp_path, one_after_another(), requests="c")
    assert {record.site.step for record in run.records(path="logits_processor")} == {5}


def test_what_never_came_is_named_in_a_note(tmp_path: Path) -> None:
    run = recorded(tmp_path, one_after_another(), requests="0,7,chat-*")
    (note,) = (note for note in run.meta["notes"] if "requests" in note)
    assert (
        note == "requests 7,chat-* never came; 3 seen, numbered from 0: a-00000001, b-0000000f, c"
    )


def test_a_recording_of_no_request_says_which_there_were(tmp_path: Path) -> None:
    with pytest.raises(EmptyDumpError, match=r"requests 7 never came; 2 seen.*: a, b"):
        recorded(tmp_path, served(), requests=7)
    with pytest.raises(EmptyDumpError, match="tokens 9 of requests a never came"):
        recorded(tmp_path, served(), requests="a", tokens=9)


def test_requests_without_an_engine_are_refused(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(
        OptionError, match=r"requests 0 are of an engine \(vLLM, llama.cpp\), and none was given"
    ):
        ld.dump(linear, path=tmp_path, requests=0).start()
    with (
        pytest.raises(EmptyDumpError, match="requests 0 are of an engine, and none computed any"),
        ld.dump(path=tmp_path, requests=0),
    ):
        linear(torch.ones(1, 2))
    with pytest.raises(OptionError, match="rounds and requests exclude each other"):
        ld.dump(linear, requests=0, rounds="0,0")


def test_a_request_that_began_before_counts_from_where_it_was_seen(tmp_path: Path) -> None:
    llm = LLM(Runner())
    first, *later = one_after_another()[2:5]
    llm.generate([first])
    with ld.dump(llm, name="late", path=tmp_path, requests=0, tokens=1) as run:
        llm.generate(later)
    assert steps_of(run) == [1]


def test_the_selected_request_is_compared_with_its_text(tmp_path: Path) -> None:
    run = recorded(tmp_path, one_after_another(), requests=1, tokens="all")
    tokens = run.rows().query("request == 'b-0000000f'")["token"].tolist()
    torch.manual_seed(0)
    model = Whole()
    with ld.dump(model, name="whole", path=tmp_path, tokens="all") as golden, torch.no_grad():
        model(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    report = ld.compare(golden, run, progress=False)
    assert report.verdict == "within_noise"
    assert any(f"{len(tokens)} positions" in note for note in report.notes())


@pytest.mark.parametrize("spec", ["", True, "3-1", "1,,2", 2.5, [], [None]])
def test_what_is_no_request_is_shown(spec: object) -> None:
    with pytest.raises(OptionError, match="requests "):
        RequestSet.parse(spec)


def test_an_id_of_digits_alone_is_no_range() -> None:
    wanted = RequestSet.parse("0-12345678")
    assert wanted.matching(5, "0-12345678")
    assert not wanted.matching(5, "5-87654321")


@given(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 12))
def test_each_token_is_in_the_steps_that_feed_it(
    prompt: int, chunks: list[int], token: int
) -> None:
    """Token 0 is fed at the positions of the prompt, and token n at position prompt + n - 1."""
    chosen = RequestFilter(RequestSet.parse("a"))
    begins, right = 0, []
    for index, count in enumerate(chunks):
        chosen.computes(index, [Part("a", begins, count, prompt)])
        fed = range(begins, begins + count)
        right.append(any(at < prompt for at in fed) if token == 0 else prompt + token - 1 in fed)
        begins += count
    wanted = TokenSet.parse(token)
    assert [chosen.selects(RootCall(n), wanted) for n in range(len(chunks))] == right
