"""A vLLM engine is recorded: each row of its flat tensors has its request, position and attempt.

The engine here is a fake with vLLM's attributes; `test_vllm_itself.py` has the real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from fake_vllm import LLM, Cached, New, Runner, Scheduled, Whole, installed, served
from llmdebug_nb.capture.compat import vllm_api
from llmdebug_nb.capture.compat.inductor import compiling
from llmdebug_nb.core.errors import CaptureError, OptionError
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store.run import Run


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def recorded(tmp_path: Path, steps: list[Scheduled], padding: int = 0, **options: object) -> Run:
    llm = LLM(Runner(padding))
    with ld.dump(llm, name="engine", path=tmp_path, **options) as run:
        llm.generate(steps)
    return run


def rows_of(run: Run) -> list[tuple[Any, ...]]:
    table = run.rows().astype(object)
    return [tuple(row) for row in table.where(table.notna(), None).itertuples(index=False)]


def test_each_row_has_the_token_that_the_model_was_given(tmp_path: Path) -> None:
    run = recorded(tmp_path, served(), padding=3, tokens="all")
    rows = rows_of(run)
    assert [row[:4] for row in rows[:5]] == [
        (0, 0, "b", 0), (0, 1, "b", 1), (0, 2, "a", 0), (0, 3, "a", 1), (0, 4, "a", 2),
    ]  # fmt: skip
    for step, row, name, position, token, attempt, sampled in rows:
        assert int(run.tensor("", step, "input", "kwargs.input_ids")[row]) == token
        assert int(run.tensor("", step, "input", "kwargs.positions")[row]) == position
        assert attempt == 0
        assert sampled == (position >= {"a": 3, "b": 5}[name])
    # each position of each request once: 3 + 5 of the prompts, two decoded ones and one
    where = sorted((row[2], row[3]) for row in rows)
    assert where == [("a", at) for at in range(5)] + [("b", at) for at in range(6)]


def test_logits_belong_to_the_step_that_computed_them(tmp_path: Path) -> None:
    llm, logits = LLM(Runner()), []
    with ld.dump(llm, name="engine", path=tmp_path, tokens="all") as run:
        for step in served():
            logits.append(llm.runner.execute_model(step).clone())
            llm.runner.sample_tokens(torch.ones(4, 8))  # of a prompt: after the step, and in it
    for step, expected in enumerate(logits):
        assert torch.equal(run.tensor("logits_processor", step=step), expected)
        assert run.tensor("logits_processor", step=step, call=1).shape == (4, 50)
    assert {call.step for call in run.root_calls()} == {0, 1, 2}


def test_steps_that_are_not_recorded_have_their_rows_too(tmp_path: Path) -> None:
    run = recorded(tmp_path, served(), tokens="1")
    assert {record.site.step for record in run.records()} == {1}
    assert set(run.rows()["step"]) == {0, 1, 2}


def test_positions_from_the_prefix_cache_are_no_missing_rows(tmp_path: Path) -> None:
    steps = [Scheduled({"a": 2}, [New("a", [5, 6, 7, 8], num_computed_tokens=2)])]
    rows = rows_of(recorded(tmp_path, steps))
    assert rows == [
        (0, None, "a", 0, 5, 0, False), (0, None, "a", 1, 6, 0, False),
        (0, 0, "a", 2, 7, 0, False), (0, 1, "a", 3, 8, 0, False),
    ]  # fmt: skip


def test_a_request_that_began_before_the_recording_has_no_known_prompt(tmp_path: Path) -> None:
    llm = LLM(Runner())
    first, *later = served()
    llm.generate([first])
    with ld.dump(llm, name="engine", path=tmp_path, tokens="all") as run:
        llm.generate(later)
    assert {row[6] for row in rows_of(run)} == {None}


def test_the_explorer_knows_which_rows_of_a_step_are_of_which_request(tmp_path: Path) -> None:
    run = recorded(tmp_path, served(), tokens="all")
    steps = RunView(run).overview()["steps"]
    found = [[tuple(one.values()) for one in step["requests"]] for step in steps]
    assert found == [
        [("b", 0, 1, 0, 1), ("a", 2, 4, 0, 2)],  # name, rows, positions
        [("b", 0, 2, 2, 4), ("a", 3, 3, 3, 3)],
        [("a", 0, 0, 4, 4), ("b", 1, 1, 5, 5)],
    ]
    assert [tuple(one) for one in run.requests()] == [
        (0, step, *one) for step, several in enumerate(found) for one in several
    ]
    whole = Whole()
    with ld.dump(whole, name="whole", path=tmp_path) as other, torch.no_grad():
        whole(input_ids=torch.tensor([[1, 2]]), positions=torch.arange(2)[None])
    assert other.requests() == []


def test_a_preempted_request_begins_its_next_attempt(tmp_path: Path) -> None:
    again = Cached(["a"], [0], {"a"})
    steps = [
        Scheduled({"a": 3}, [New("a", [1, 2, 3])]),
        Scheduled({"a": 4}, [], again),
        Scheduled({"a": 1}, [], Cached(["a"], [4])),
    ]
    rows = rows_of(recorded(tmp_path, steps, tokens="all"))
    assert [(row[3], row[5]) for row in rows] == [
        *((at, 0) for at in range(3)), *((at, 1) for at in range(5)),
    ]  # fmt: skip


def test_a_preempted_request_finds_its_tokens_in_the_cache(tmp_path: Path) -> None:
    steps = [
        Scheduled({"a": 3}, [New("a", [1, 2, 3])]),
        Scheduled({"a": 2}, [], Cached(["a"], [2], {"a"})),
    ]
    rows = rows_of(recorded(tmp_path, steps, tokens="all"))
    assert [row[1:4] for row in rows[3:]] == [
        (None, "a", 0), (None, "a", 1), (0, "a", 2), (1, "a", 3),
    ]  # fmt: skip
    assert [row[4] for row in rows[3:6]] == [1, 2, 3]
    assert {row[5] for row in rows[3:]} == {1}


def test_an_engine_that_nobody_has_given_is_found_when_it_runs(tmp_path: Path) -> None:
    given = recorded(tmp_path / "given", served(), tokens="all")
    llm = LLM(Runner())
    with ld.dump(name="found", path=tmp_path, tokens="all") as found:
        llm.generate(served())
        llm.runner.dummy(9)
    assert rows_of(found) == rows_of(given)
    assert len(list(found.records())) == len(list(given.records()))
    assert torch.equal(found.tensor("embed", step=2), given.tensor("embed", step=2))
    assert not [name for name in vars(llm.runner) if "llmdebug" in name]


def test_an_engine_that_warms_up_first_is_found_too(tmp_path: Path) -> None:
    llm = LLM(Runner())
    with ld.dump(name="found", path=tmp_path, tokens="all") as run:
        llm.runner.dummy(9)
        llm.generate(served())
    assert {record.summary.shape[0] for record in run.records(path="embed")} == {5, 4, 2}
    assert [row[0] for row in rows_of(run)] == [0] * 5 + [1] * 4 + [2] * 2
    assert any(": 1, not recorded" in note for note in run.meta["notes"])


def test_dummy_runs_are_counted_and_not_recorded(tmp_path: Path) -> None:
    llm = LLM(Runner())
    with ld.dump(llm, name="engine", path=tmp_path, tokens="all") as run:
        llm.runner.dummy(7)
        llm.generate(served())
        llm.generate([Scheduled({})])  # a step without tokens is none
        llm.runner.dummy(9)
    assert {record.summary.shape[0] for record in run.records(path="embed")} == {5, 4, 2}
    (note,) = (note for note in run.meta["notes"] if "forward calls outside" in note)
    assert ": 2, not recorded" in note


def test_the_engine_gives_the_same_logits_and_gets_its_methods_back(tmp_path: Path) -> None:
    plain = LLM(Runner()).generate(served())
    llm = LLM(Runner())
    before = set(vars(llm.runner))
    first = ld.dump(llm, name="one", path=tmp_path, tokens="all")
    first.start()
    with ld.dump(llm, name="two", path=tmp_path, tokens="all", mode="module+api") as run:
        logits = llm.generate(served()[:2])
        first.stop()  # the other one goes on
        logits += llm.generate(served()[2:])
    assert all(map(torch.equal, plain, logits))
    assert set(vars(llm.runner)) - {"logits"} == before
    assert set(run.rows()["step"]) == {0, 1, 2}
    with (
        pytest.raises(RuntimeError, match="lost"),
        ld.dump(llm, name="three", path=tmp_path),
    ):
        llm.runner.execute_model(served()[0], fails=True)
    assert set(vars(llm.runner)) - {"logits"} == before
    assert not any(module._forward_pre_hooks for module in llm.runner.model.modules())


def test_a_missing_attribute_is_named_with_the_release(tmp_path: Path) -> None:
    llm = LLM(Runner())
    llm.llm_engine.model_executor.driver_worker.worker = object()
    with pytest.raises(CaptureError, match=r"vLLM 0\.99: object has no 'model_runner'"):
        ld.dump(llm, path=tmp_path).start()
    llm.llm_engine.model_executor = SimpleNamespace(workers=[object(), object()])
    with pytest.raises(CaptureError, match="workers are processes of their own"):
        ld.dump(llm, path=tmp_path).start()
    del llm.llm_engine.model_executor
    with pytest.raises(CaptureError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        ld.dump(llm, path=tmp_path).start()


def test_a_missing_field_of_the_scheduler_is_named_too() -> None:
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 1})
    with pytest.raises(CaptureError, match=r"SimpleNamespace has no 'scheduled_cached_reqs'"):
        vllm_api.scheduled_requests(scheduled)


def test_a_request_that_is_aborted_keeps_the_rows_it_had(tmp_path: Path) -> None:
    first, second, _ = served()
    last = Scheduled({"b": 1}, [], Cached(["b"], [5]))  # a is gone, and no step says so
    rows = rows_of(recorded(tmp_path, [first, second, last], tokens="all"))
    assert [row[3] for row in rows if row[2] == "a"] == [0, 1, 2, 3]
    assert [row[3] for row in rows if row[2] == "b"] == [0, 1, 2, 3, 4, 5]


def test_an_engine_that_dies_leaves_what_it_had_computed(tmp_path: Path) -> None:
    llm, (first, second, _) = LLM(Runner()), served()
    llm.runner.execute_model(first)  # by now it knows the requests
    with (
        pytest.raises(RuntimeError, match="lost"),
        ld.dump(llm, name="dead", path=tmp_path, tokens="all"),
    ):
        llm.runner.execute_model(second, fails=True)
    run = ld.open_run(tmp_path / "dead")
    assert run.tensor("embed", step=0).shape[0] == len(rows_of(run)) == 4
    assert run.meta["ended_by"] == "RuntimeError"
    assert not run.source.complete


SERVER = """
import os, signal, sys
import pytest
from fake_vllm import LLM, Runner, installed, served

if len(sys.argv) == 3:
    child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, __file__, sys.argv[1]])
    os.waitpid(child, 0)
    sys.exit(int(sys.argv[2]))
installed(pytest.MonkeyPatch())
runner = Runner()
if sys.argv[1] == "within":
    class Mlp(type(runner.model.mlp)):
        def forward(self, hidden):
            os.kill(os.getpid(), signal.SIGKILL)
    runner.execute_model(served()[0])
    runner.model.mlp.__class__ = Mlp
    LLM(runner).generate(served()[1:])
LLM(runner).generate(served())
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("killed", "status", "complete"),
    [("between", 0, True), ("between", 1, False), ("within", 0, False)],
)
def test_a_server_may_kill_its_engine_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str, status: int, complete: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), killed, str(status)]
    done = ld.launch(command, name="served", path=tmp_path, tokens="all")
    assert done.status == status
    run = done.run
    assert run.source.complete is complete
    assert any("is incomplete" in line for line in done.lines("warning")) is not complete
    assert any("killed between two steps" in note for note in run.meta.get("notes", [])) is complete
    if complete:
        given = recorded(tmp_path / "given", served(), tokens="all")
        assert rows_of(run) == rows_of(given)
        assert run.meta["recorded"] == given.meta["recorded"]
        assert run.meta["settings"] == given.meta["settings"]


def test_what_a_living_process_writes_is_not_closed(tmp_path: Path) -> None:
    llm = LLM(Runner())
    with ld.dump(llm, name="engine", path=tmp_path, tokens="all") as run:
        llm.generate(served())
        (folder,) = (each for each in (tmp_path / "engine").iterdir() if each.is_dir())
        script = "import sys, pathlib; from llmdebug_nb.store import writer;" + (
            " print(writer.finish(pathlib.Path(sys.argv[1])))"
        )
        asked = subprocess.run(
            [sys.executable, "-c", script, folder], capture_output=True, text=True, check=True
        )
        assert asked.stdout == "False\n"
        llm.generate(served()[:1])
    assert run.source.complete


def test_force_eager_switches_compiled_parts_off_and_on_again(tmp_path: Path) -> None:
    llm = LLM(Runner())
    llm.runner.model.mlp.do_not_compile = False
    with ld.dump(llm, name="engine", path=tmp_path, force_eager=True):
        assert llm.runner.model.mlp.do_not_compile
        llm.generate(served())
    assert llm.runner.model.mlp.do_not_compile is False
    with ld.dump(llm, name="compiled", path=tmp_path) as run:
        llm.generate(served())
    assert any("force_eager=True" in note for note in run.meta["notes"])


def test_of_a_compiled_engine_the_modules_outside_of_that_code_are_recorded(tmp_path: Path) -> None:
    llm = LLM(Runner())
    part = llm.runner.model.mlp
    part.do_not_compile = False
    part._compiled_callable = torch.compile(part.forward)  # type: ignore[assignment]
    with ld.dump(llm, name="engine", path=tmp_path, tokens="all") as run:
        llm.generate(served())
    assert {"", "logits_processor"} <= {record.site.path for record in run.records()}
    (note,) = run.meta["notes"]
    assert "force_eager=True" in note
    assert "graph='fused'" in note


@pytest.mark.parametrize("graph", ["fx", "fused", "both"])
def test_the_compiled_code_of_an_engine_is_recorded_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, graph: str
) -> None:
    """Inductor gets the engine's own settings, and of those only what it knows."""
    if graph != "fx":
        request.getfixturevalue("inductor")
    given: list[dict[str, object]] = []
    compile_traced = compiling.compile_traced

    def compiled(traced: Any, inputs: Any, switch: Any, config: Any, observe: Any) -> Any:
        given.append(config)
        return compile_traced(traced, inputs, switch, config, observe)

    monkeypatch.setattr(compiling, "compile_traced", compiled)
    plain, llm = LLM(Runner()).generate(served()), LLM(Runner())
    settings = {"size_asserts": False, "dce": True, "of vLLM alone": 1}
    llm.runner.vllm_config = SimpleNamespace(  # type: ignore[attr-defined]
        compilation_config=SimpleNamespace(inductor_compile_config=settings)
    )
    own = None if graph == "fx" else {"dce": False}
    with ld.dump(
        llm, name="engine", path=tmp_path, tokens="all", graph=graph, compiler_config=own
    ) as run:
        found = llm.generate(served())
    assert all(map(torch.equal, plain, found))
    assert run.meta["problems"] == {}
    assert all("compiles its model" not in note for note in run.meta.get("notes", []))
    eager = recorded(tmp_path / "eager", served(), tokens="all")
    runs = [run, ld.open_run(tmp_path / "engine.fx")] if graph == "both" else [run]
    for each in runs:
        assert rows_of(each) == rows_of(eager)
    assert any(record.site.path.startswith("mlp/") for record in run.records())
    wanted = [] if graph == "fx" else [{"size_asserts": False, "dce": False}]
    assert [dict(each) for each in given[:1]] == wanted


def test_requests_choose_the_steps_of_compiled_code(tmp_path: Path) -> None:
    llm = LLM(Runner())
    with ld.dump(llm, name="engine", path=tmp_path, graph="fx", requests="1", tokens="1") as run:
        llm.generate(served())
    assert {record.site.step for record in run.records()} == {2}


def test_a_redacted_copy_has_no_tokens(tmp_path: Path) -> None:
    run = recorded(tmp_path, served(), tokens="all")
    copy = ld.redact_run(run, tmp_path / "shared")
    assert run.rows()["token"].notna().all()
    assert copy.rows()["token"].isna().all()
    assert list(copy.rows()["position"]) == list(run.rows()["position"])


def test_other_runs_have_no_rows(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    with ld.dump(linear, name="plain", path=tmp_path) as run:
        linear(torch.ones(1, 2))
    assert run.rows().empty


def test_what_is_no_model_says_what_may_be_recorded() -> None:
    with pytest.raises(OptionError, match=r"vllm\.LLM"):
        ld.dump(object())
