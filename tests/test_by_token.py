"""An engine's run is compared with one of whole texts: by request and position, not by step."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from fake_vllm import LLM, Cached, New, Runner, Scheduled, Whole, installed, served
from llmdebug_nb.app.scratch import Scratch
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.store.by_token import Sizes, rows_of
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.sequences import Place, TokenSequence, shared


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def engine(tmp_path: Path, steps: Sequence[Scheduled], bug: bool = False, **options: object) -> Run:
    llm = LLM(Runner(padding=2))
    if bug:
        with torch.no_grad():
            llm.runner.model.mlp.weight.mul_(1.1)
    with ld.dump(llm, name="engine", path=tmp_path, tokens="all", **options) as run:
        llm.generate(steps)
    return run


def texts_of(run: Run) -> list[list[int]]:
    table = run.rows().drop_duplicates(["request", "position"])
    return [list(rows.sort_values("position")["token"]) for _, rows in table.groupby("request")]


def whole(tmp_path: Path, texts: Sequence[Sequence[int]]) -> Run:
    """Record the model of the engine on whole texts, ``[1, tokens]`` each."""
    model = Whole()
    model.load_state_dict(Runner().model.state_dict())
    with ld.dump(model, name="whole", path=tmp_path, tokens="all") as run, torch.no_grad():
        for text in texts:
            ids = torch.tensor([list(map(int, text))])
            model(input_ids=ids, positions=torch.arange(len(text))[None])
    return run


def test_batched_and_chunked_steps_agree_with_whole_texts(tmp_path: Path) -> None:
    mine = engine(tmp_path, served())
    report = ld.compare(whole(tmp_path, texts_of(mine)), mine)
    assert report.verdict in ("match", "within_noise")
    assert any("2 of mine's 2 requests, 11 positions" in note for note in report.notes())
    table = report.to_pandas()
    seen = table[table["path"] == "mlp"]
    assert set(seen["verdict"]) <= {"match", "within_noise"}
    assert {tuple(shape) for shape in seen["golden_shape"]} == {(1, 5, 8), (1, 6, 8)}
    # logits of the last token of each step alone: a has 3 steps, and so has b
    logits = table[(table["path"] == "head") & (table["role"] == "output")]
    assert {tuple(shape) for shape in logits["golden_shape"]} == {(1, 3, 50)}
    assert set(logits["verdict"]) <= {"match", "within_noise"}


@pytest.mark.parametrize("bug", [False, True])
def test_of_workers_that_share_an_engine_the_first_one_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: bool
) -> None:
    mine = engine(tmp_path, served(), bug)
    alone, golden = mine.rows(), whole(tmp_path, texts_of(mine))
    monkeypatch.setenv("RANK", "1")
    other = engine(tmp_path / "other", served(), bug)
    assert mine.path is not None
    assert other.path is not None
    (folder,) = other.path.glob("rank1_*")
    shutil.move(folder, mine.path)
    mine = ld.open_run(mine.path)
    assert mine.info()["ranks"] == [0, 1]
    assert mine.rows().equals(alone)
    report = ld.compare(golden, mine)
    assert (report.verdict == "diverged") == bug
    assert "rank 0 of 2 is compared" in str(report)


def test_several_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    mine, other = engine(tmp_path, served()), engine(tmp_path / "other", served())
    assert mine.path is not None
    assert other.path is not None
    (folder,) = other.path.glob("rank0_*")
    shutil.move(folder, mine.path / "rank0_1")
    with pytest.raises(CompareError, match="2 processes, several of rank 0"):
        ld.compare(whole(tmp_path, [[1, 2, 3]]), ld.open_run(mine.path))


def test_a_wrong_weight_of_the_engine_is_blamed(tmp_path: Path) -> None:
    mine = engine(tmp_path, served(), bug=True)
    golden = whole(tmp_path, [[1, 2, 3], [4, 5, 6, 7, 8]])
    report = ld.compare(golden, mine)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "mlp"


def test_cached_and_preempted_positions_are_compared_where_they_were_computed(
    tmp_path: Path,
) -> None:
    mine = engine(tmp_path, [
        Scheduled({"a": 2}, [New("a", [5, 6, 7, 8], num_computed_tokens=2)]),
        Scheduled({"a": 4}, [], Cached(["a"], [0], {"a"})),
    ])  # fmt: skip
    report = ld.compare(whole(tmp_path, [[5, 6, 7, 8]]), mine)
    assert report.verdict in ("match", "within_noise")
    (first, *_) = (note for note in report.notes() if "by request" in note)
    assert "2 of mine's 2 requests, 6 positions" in first  # two, and all four again
    assert any("2 positions came from the engine's cache" in note for note in report.notes())


def test_positions_behind_another_token_are_not_compared(tmp_path: Path) -> None:
    mine = engine(tmp_path, [Scheduled({"a": 4}, [New("a", [5, 6, 7, 8])])])
    report = ld.compare(whole(tmp_path, [[5, 6, 9, 8]]), mine)
    assert report.verdict in ("match", "within_noise")
    assert any("2 positions follow a token that differs" in note for note in report.notes())


def test_texts_that_have_nothing_in_common_are_refused_with_their_ids(tmp_path: Path) -> None:
    mine = engine(tmp_path, served())
    with pytest.raises(CompareError, match=r"golden's begin \[40, 41\], mine's \[4, 5, 6"):
        ld.compare(whole(tmp_path, [[40, 41]]), mine)


def test_runs_without_values_are_refused(tmp_path: Path) -> None:
    mine = engine(tmp_path, served(), stats_only=True)
    golden = whole(tmp_path, [[1, 2, 3]])
    with pytest.raises(CompareError, match=r"engine: no tensor has values .* stats_only"):
        ld.compare(golden, mine)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    program = (
        "import sys; from llmdebug_nb.app.scratch import Scratch\n"
        "own = Scratch('by-token'); print(own.path, flush=True); sys.stdin.read()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, living = (Path(process.stdout.readline().strip()) for process in processes)  # type: ignore[union-attr]
    other = tmp_path / "llmdebug-by-token-other"
    other.mkdir()  # no lock: it is just being made
    processes[0].kill()
    processes[0].wait()
    own = Scratch("by-token")
    try:
        assert sorted(tmp_path.iterdir()) == sorted([living, other, own.path])
        assert not killed.exists()
    finally:
        own.remove()
        processes[1].communicate()
    assert not own.path.exists()


def test_a_calibration_is_refused(tmp_path: Path) -> None:
    mine = engine(tmp_path, served())
    golden = whole(tmp_path, texts_of(mine))
    with pytest.raises(CompareError, match="calibrate"):
        ld.compare(golden, mine, calibrate=golden, progress=False)


def test_the_runs_by_tokens_are_gone_with_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    mine = engine(tmp_path, served())
    golden = whole(tmp_path, texts_of(mine))
    report = ld.compare(golden, mine)
    assert len(list(elsewhere.iterdir())) == 2
    assert str(report).startswith("whole against engine")
    assert report.mine.meta["setup"] == mine.meta["setup"]  # it is still that recording
    del report
    gc.collect()
    with pytest.raises(CompareError):
        ld.compare(whole(tmp_path, [[40]]), mine)
    assert list(elsewhere.iterdir()) == []


# -- pairing texts ---------------------------------------------------------------------------------


def text(tokens: Sequence[int], computed: Sequence[int] | None = None) -> TokenSequence:
    places = range(len(tokens)) if computed is None else computed
    return TokenSequence(
        "", dict(enumerate(tokens)), {at: Place((0, 0), None, at) for at in places}
    )


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5))
def test_each_text_finds_itself_in_any_order(texts: list[list[int]]) -> None:
    found = shared([text(each) for each in texts], [text(each) for each in reversed(texts)])
    assert len(found) == len(texts)
    for golden, mine, positions in found:
        assert len(positions) == len(mine.tokens)
        alike = [golden.tokens[at] for at in positions]
        assert alike == [mine.tokens[at] for at in positions]


def test_equal_texts_are_paired_one_by_one() -> None:
    same = [text([1, 2]), text([1, 2])]
    found = shared(same, [text([1, 2]), text([1, 2])])
    assert [id(each.golden) for each in found] == [id(each) for each in same]


@pytest.mark.parametrize(
    ("shape", "sizes", "place", "expected"),
    [
        ((16, 8), Sizes(16, None, 3), Place((0, 0), None, 5), (-1, 0, 5)),
        ((20, 8), Sizes(16, None, 3), Place((0, 0), None, 5), (-1, 0, 5)),  # padded
        ((3, 50), Sizes(16, None, 3), Place((0, 0), None, 15, 2), (-1, 0, 2)),  # logits
        ((3, 50), Sizes(16, None, 3), Place((0, 0), None, 5), None),
        ((2, 7, 8), Sizes(7, 2, 2), Place((0, 0), 1, 4), (1, 1, 4)),
        ((2, 4, 7, 8), Sizes(7, 2, 2), Place((0, 0), 1, 4), (1, 2, 4)),  # heads
        ((2, 1, 50), Sizes(7, 2, 2), Place((0, 0), 1, 6), (1, 1, 0)),  # logits of the last row
        ((2, 1, 50), Sizes(7, 2, 2), Place((0, 0), 1, 4), None),
        ((7, 8), Sizes(7, 1, 1), Place((0, 0), 0, 4), (-1, 0, 4)),
        ((), Sizes(7, 1, 1), Place((0, 0), 0, 4), None),
    ],
)
def test_a_token_has_its_row(
    shape: tuple[int, ...], sizes: Sizes, place: Place, expected: tuple[int, int, int] | None
) -> None:
    assert rows_of(shape, sizes, place) == expected
