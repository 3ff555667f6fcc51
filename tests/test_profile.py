"""Times of operators, kernels, host and gaps; launch configurations; their files and pictures."""

from __future__ import annotations

import csv
import json
import shutil
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import llmdebug_nb as ld
from llmdebug_nb.app.tables import ort_kernels
from llmdebug_nb.capture.compat import torch_profiler, triton
from llmdebug_nb.capture.compat.torch_profiler import Event
from llmdebug_nb.capture.onnx import ort_profile
from llmdebug_nb.capture.timing.profile_rows import ProfilerMark, TimedStep, profile_rows
from llmdebug_nb.capture.timing.program_clock import Clock
from llmdebug_nb.cli import main
from llmdebug_nb.core.columns import LAUNCHES
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.show import html
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store import tables, tiling
from models import hooks_left, llama, prompt
from recordings import add_process, change_index

SLOW = 0.05  # seconds


class Slow(nn.Module):
    """Spends time on the host between two operators."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = self.inner(x)
        time.sleep(SLOW)
        return x.relu()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of a Llama with all tables that eager code has."""
    model = llama()
    with (
        torch.no_grad(),
        ld.dump(
            model, name="p", path=tmp_path_factory.mktemp("p"), profile="op+kernel+host"
        ) as run,
    ):
        model(prompt())
        model(prompt())
    return run


class _Counts(TorchDispatchMode):
    """Counts the operators of the dispatcher, independently of the profiler."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_the_kernels_of_a_step_are_those_that_the_dispatcher_runs(run):
    model = llama()
    with torch.no_grad(), _Counts() as counts:
        model(prompt())
    kernels = Counter(run.kernels().query("step == 1")["kernel"])
    for name in (
        "aten::mm",
        "aten::embedding",
        "aten::silu",
        "aten::rsqrt",
        "aten::mean",
        "aten::cat",
        "aten::pow",
        "aten::cos",
    ):
        assert kernels[name] == counts.seen[name] > 0, name


def test_host_times_of_operators_lie_inside_their_module_and_never_overlap(run):
    host = run.host().query("step == 1")
    spans = {
        row.path: (row.start, row.start + row.duration)
        for row in host[host["level"] == "module"].itertuples()
    }
    ops = host[host["level"] == "op"]
    assert len(ops) > 100
    for row in ops.itertuples():
        begin, end = spans[row.path.partition("/")[0]]
        assert begin <= row.start
        assert row.start + row.duration <= end
    ends = ops["start"] + ops["duration"]
    assert (ops["gap"] >= 0).all()
    assert (ops["start"].to_numpy()[1:] >= ends.to_numpy()[:-1]).all()
    whole = float(ops["duration"].sum() + ops["gap"].sum())
    assert whole <= spans[""][1] - spans[""][0]


def test_kernels_run_inside_the_operators_that_launch_them(run):
    ops = {
        (row.step, row.path, row.call): row for row in run.host().itertuples() if row.level == "op"
    }
    kernels = run.kernels()
    for row in kernels.itertuples():
        around = ops[row.step, row.path, row.call]
        assert around.start <= row.start
        assert row.start + row.duration <= around.start + around.duration + 1e-6
    assert set(kernels["device"]) == {"cpu"}


def test_every_module_that_runs_has_its_time_once_a_step(run):
    ran = Counter()
    model = llama()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.update([name]))
    with torch.no_grad():
        model(prompt())
    modules = run.host().query("step == 0 and level == 'module'")
    assert Counter(modules["path"]) == ran


def clocked(model, x, folder):
    """Return the model's own time, the recorder's, and the time around both in us; and the run."""
    with torch.no_grad(), ld.dump(model, name="s", path=folder, profile="host") as run:
        began = time.perf_counter()
        model(x)
        around = (time.perf_counter() - began) * 1e6
    summed = "SELECT sum(duration) FROM all_timings WHERE level = 'recording'"
    own = run.index.query(tuple, summed)[0][0] / 1e3
    return float(run.host().query("path == ''")["duration"].iloc[0]), own, around, run


def test_a_gap_holds_the_work_of_the_program_and_not_that_of_recording(
    tmp_path,
):
    model = Slow()
    whole, ours, around, run = clocked(model, torch.randn(2000, 8), tmp_path)
    assert run.host().set_index("path").loc["/Aten.relu", "gap"] >= SLOW * 1e6
    assert ours > 0
    assert whole + ours <= around


def test_a_slow_hook_of_the_recording_adds_nothing_to_the_programs_times(tmp_path, monkeypatch):
    from llmdebug_nb.capture.recorder import Recorder

    see = Recorder.record

    def slow(self, *args):
        time.sleep(SLOW)
        return see(self, *args)

    monkeypatch.setattr(Recorder, "record", slow)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    whole, ours, around, _ = clocked(model, torch.ones(2, 4), tmp_path)
    assert ours > 4 * SLOW * 1e6
    assert whole + ours <= around  # a hook that counted for the program would be counted twice


@pytest.mark.parametrize("mode", ["module", "module+api", "module+aten"])
def test_outputs_gradients_and_randomness_are_the_same_bits_with_a_profile(mode, tmp_path):
    def train(options):
        model = llama()
        model.train()
        torch.manual_seed(1)
        if options is None:
            loss = model(prompt(), labels=prompt()).loss
            loss.backward()
        else:
            with ld.dump(model, name="b", path=tmp_path, **options):
                loss = model(prompt(), labels=prompt()).loss
                loss.backward()
        assert hooks_left(model) == 0
        return [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]

    plain = train(None)
    profiled = train({"mode": mode, "profile": "op+kernel+host"})
    assert all(torch.equal(a, b) for a, b in zip(plain, profiled, strict=True))
    assert not torch_profiler.enabled()


def test_backward_operators_belong_to_the_modules_of_their_forward_operators(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with ld.dump(model, name="t", path=tmp_path, profile="kernel+host") as run:
        model(torch.ones(2, 4)).sum().backward()
    backward = run.host().query("phase == 'backward'")
    assert {"2/Aten.mm", "1/Aten.threshold_backward", "0/Aten.mm"} <= set(backward["path"])
    forward = run.host().query("phase == 'forward' and level == 'op'")
    assert backward["start"].min() >= (forward["start"] + forward["duration"]).max()
    assert {"aten::mm", "aten::threshold_backward"} <= set(
        run.kernels().query("phase == 'backward'")["kernel"]
    )


def test_with_operators_recorded_a_kernel_names_the_recorded_call(tmp_path):
    model = llama()
    with (
        torch.no_grad(),
        ld.dump(model, name="a", path=tmp_path, mode="module+aten", profile="kernel+host") as run,
    ):
        model(prompt())
    recorded = {(row.path, row.call) for row in run.operators().itertuples()}
    kernels = run.kernels()
    known = [(row.path, row.call) in recorded for row in kernels.itertuples()]
    assert sum(known) == len(known) > 80
    assert kernels.groupby(["path", "call"]).size().max() == 1
    assert any("include the cost of the dispatch mode" in note for note in run.meta["notes"])


def test_only_steps_that_are_asked_for_have_times(tmp_path):
    model = llama()
    with (
        torch.no_grad(),
        ld.dump(model, name="s", path=tmp_path, tokens="1", profile="host") as run,
    ):
        for _ in range(3):
            model(prompt())
    assert set(run.host()["step"]) == {1}
    assert len(run.kernels()) == 0


def test_a_model_that_fails_fails_with_its_own_error_and_leaves_no_profiler_behind(tmp_path):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(self.a(x))

    model = Fails()
    with (
        pytest.raises(RuntimeError, match="shapes"),
        ld.dump(model, name="f", path=tmp_path, profile="kernel+host"),
    ):
        model(torch.ones(1, 2))
    assert not torch_profiler.enabled()
    assert hooks_left(model) == 0
    run = ld.open_run(tmp_path / "f")
    assert "a/Aten.linear" in set(run.host()["path"])


def test_a_program_with_a_profiler_of_its_own_keeps_it_and_the_dump_says_so(tmp_path):
    model = nn.Linear(2, 2)
    with (
        torch.no_grad(),
        torch.autograd.profiler.profile() as theirs,
        ld.dump(model, name="n", path=tmp_path, profile="host") as run,
    ):
        model(torch.ones(1, 2))
    assert any(event.name == "aten::addmm" for event in theirs.function_events)
    assert len(run.host()) == 0
    assert any("uses PyTorch's profiler itself" in note for note in run.meta["notes"])


def test_a_model_that_starts_a_profiler_gets_it(tmp_path):
    class Profiles(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            with torch.profiler.profile() as self.seen:
                return self.inner(x)

    model = Profiles()
    with torch.no_grad(), ld.dump(model, name="n", path=tmp_path, profile="host") as run:
        model(torch.ones(1, 2))
    assert any(event.name == "aten::addmm" for event in model.seen.events())
    assert any("uses PyTorch's profiler itself" in note for note in run.meta["notes"])
    with torch.profiler.profile() as later:
        model.inner(torch.ones(1, 2))
    assert any(event.name == "aten::addmm" for event in later.events())


def test_two_threads_leave_the_times_of_one_and_no_error(tmp_path):
    model = nn.Sequential(Slow())
    with torch.no_grad(), ld.dump(model, name="t", path=tmp_path, profile="host") as run:
        both = [threading.Thread(target=lambda: model(torch.ones(2, 8))) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join()
    assert not run.meta["problems"]
    assert len(run.host().query("path == '0/Aten.relu'")) >= 1


# -- compiled code --------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.b(torch.nn.functional.silu(self.a(x)) * 2).softmax(-1)


@pytest.fixture(scope="module")
def fused(inductor, tmp_path_factory):
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(4, 64)
    with (
        torch.no_grad(),
        ld.dump(
            model,
            name="k",
            path=tmp_path_factory.mktemp("k"),
            graph="fused",
            profile="kernel+host+tiling",
        ) as run,
    ):
        outputs = [model(x), model(x)]
    with torch.no_grad():
        plain = torch.compile(model, fullgraph=True)(x)
    return run, outputs, plain


def test_fused_kernels_are_those_of_the_kernels_table_each_once_a_step(fused):
    run, outputs, plain = fused
    assert torch.equal(outputs[0], plain)
    assert torch.equal(outputs[1], plain)
    compiled = [name for (name,) in run.index.query(tuple, "SELECT name FROM all_kernels")]
    for _, kernels in run.kernels().groupby("step"):
        assert sorted(kernels["code"]) == sorted(compiled)
    assert sum("cpp_fused" in name for name in compiled) >= 2
    host = run.host().query("step == 1 and level == 'op'")
    assert {"a/Aten.addmm", "b/Aten.addmm"} <= set(host["path"])
    assert (host["gap"] >= 0).all()


def test_compiling_is_no_time_of_the_program(fused):
    run, _, _ = fused
    ours = (
        run.index.query(
            tuple, "SELECT duration FROM all_timings WHERE level = 'recording' AND step = 0"
        )[0][0]
        / 1e3
    )
    first = float(run.host().query("step == 0 and path == ''")["duration"].iloc[0])
    assert first < ours  # seconds of compilation


def test_launch_configurations_say_how_the_loops_of_the_source_go(fused):
    run, _, _ = fused
    table = run.tiling().set_index("kernel")
    for name, source in run.index.query(
        tuple, "SELECT name, source FROM all_kernels WHERE source != ''"
    ):
        row = table.loc[name]
        assert row["language"] == "cpp"
        assert len(row["loops"]) == source.count("for(int64_t ")
        assert len(row["arguments"]) == source.partition(")")[0].count("*")
        assert (row["vector"] > 1) == ("Vectorized<" in source)
        assert row["threads"] == 1 or "omp parallel" in source


def test_launch_configurations_are_written_a_row_a_kernel(fused, tmp_path):
    run, _, _ = fused
    (file,) = [path for path in ld.write_tables(run, tmp_path) if path.name == "kernel_tiling.csv"]
    assert file.parent == tmp_path / "tiling"
    with open(file, newline="", encoding="utf-8") as text:
        rows = {row["kernel"]: row for row in csv.DictReader(text)}
    sources = dict(
        run.index.query(tuple, "SELECT name, source FROM all_kernels WHERE source != ''")
    )
    assert rows.keys() == sources.keys()
    for name, row in rows.items():
        assert len(row["loops"].split(";")) == sources[name].count("for(int64_t ")
        assert row["registers"] == ""  # of Triton's kernels


@given(
    st.lists(
        st.tuples(st.sampled_from(["x0", "x1", "x2"]), st.integers(0, 9), st.one_of(st.integers(1,
            4096).map(str), st.just("ks0")), st.sampled_from([1, 8, 16])),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_any_nest_of_loops_is_read_back(nest):
    source = 'extern "C" void kernel(const float* a)\n{\n'
    for name, low, high, step in nest:
        bound = f"{high}L" if high.isdigit() else high
        source += (
            f"for(int64_t {name}=static_cast<int64_t>({low}L); "
            f"{name}<static_cast<int64_t>({bound}); "
            f"{name}+=static_cast<int64_t>({step}L))\n{{\n"
        )
    source += "at::vec::Vectorized<float> v;\n" + "}\n" * (len(nest) + 1)
    expected = [
        "  " * depth + f"{name}: {low} to {high} by {step}"
        for depth, (name, low, high, step) in enumerate(nest)
    ]
    assert tiling.loops(source) == expected
    assert tiling.vector(source) == max(step for *_, step in nest)


@given(st.text(max_size=300), st.text(max_size=100))
def test_no_source_and_no_configuration_breaks_the_table(source, configuration):
    rows = tiling.rows([("k", source)], [("k", configuration), ("t", configuration)])
    assert all(set(row) == set(tiling.COLUMNS) for row in rows)


def test_a_triton_kernel_tells_grid_blocks_warps_and_registers():
    """Stand in for a launcher of `CachingAutotuner`, without a GPU; the grid is Inductor's own."""
    config = SimpleNamespace(kwargs={"XBLOCK": 128, "YBLOCK": 4}, num_warps=4, num_stages=1)
    launcher = SimpleNamespace(config=config, n_regs=24, n_spills=0, shared=512)
    autotuner = SimpleNamespace(
        launchers=[launcher],
        inductor_meta={"grid_type": "Grid2D"},
        triton_meta={"signature": {"in_ptr0": "*fp32"}},
    )
    code: dict = {"triton_poi_fused_add_0": autotuner, "empty": object()}
    exec("def call(args): ...", code)
    found = dict(triton.configurations(SimpleNamespace(current_callable=code["call"])))
    (row,) = tiling.rows(
        [], [("graph0/triton_poi_fused_add_0", json.dumps(found["triton_poi_fused_add_0"]))]
    )
    assert row["grid"][:2] == ["ceil(xnumel / 128)", "ceil(ynumel / 4)"]
    assert (row["block"], row["warps"], row["stages"]) == ({"XBLOCK": 128, "YBLOCK": 4}, 4, 1)
    assert (row["registers"], row["spills"], row["shared"], row["language"]) == (
        24,
        0,
        512,
        "triton",
    )
    assert row["arguments"] == ["*fp32 in_ptr0"]


# -- the clock, and events that only an accelerator has -------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50))),
    st.lists(st.integers(0, 1100), min_size=2),
)
def test_the_clock_counts_every_nanosecond_outside_our_own_work(stands, moments):
    intervals = [(start, start + length) for start, length in stands]
    clock = Clock(intervals, 0)
    ours = {at for start, end in intervals for at in range(start, end)}
    for moment in moments:
        assert clock(moment) - clock(0) == sum(at not in ours for at in range(moment))
        assert clock.is_paused(moment) == (moment in ours)


def _call(path, op, number=0):
    return SimpleNamespace(
        path=path, number=number, op=op, level="module", module=path, phase="forward"
    )


def _timed(events, marks):
    step = TimedStep(lambda name: name == "aten::mm", lambda name: name)
    by_start = sorted(events, key=lambda event: (event.start, -event.end))
    return profile_rows(by_start, marks, step)


def test_a_device_kernel_belongs_to_the_operator_that_launched_it_and_stands_for_its_cpu_part():
    root = _call("", "Model")
    events = [
        Event("llmdebug 0", "mark", 1, 0, 10, mark=0),
        Event("aten::linear", "op", 1, 20, 60, id=5),
        Event("aten::mm", "op", 1, 30, 50, id=6, inputs=(("float32", [2, 3]),)),
        Event("cudaLaunchKernel", "frame", 1, 40, 45),
        Event("sgemm", "device", 0, 70, 170, launched_by=6, device="cuda:0", stream=7),
        Event("ours", "device", 0, 60, 61, launched_by=99, device="cuda:0", stream=7),
        Event("llmdebug 1", "mark", 1, 80, 90, mark=1),
    ]
    found = _timed(events, {0: [ProfilerMark(True, root)], 1: [ProfilerMark(False, root)]})
    assert found.launches == [
        [
            "/aten::linear",
            0,
            "forward",
            "aten::linear",
            "sgemm",
            None,
            "cuda:0",
            7,
            60,
            100,
            '[["float32", [2, 3]]]',
            None,
        ]
    ]
    assert [row[:2] for row in found.timings if row[3] == "module"] == [["", 0]]


def test_calls_left_open_by_an_error_end_with_the_one_around_them():
    root, inner = _call("", "Model"), _call("a", "Linear")
    marks = [Event(f"llmdebug {at}", "mark", 1, 10 * at, 10 * at + 1, mark=at) for at in range(3)]
    found = _timed(
        marks,
        {
            0: [ProfilerMark(True, root)],
            1: [ProfilerMark(True, inner)],
            2: [ProfilerMark(False, root)],
        },
    )
    assert [row[0] for row in found.timings if row[3] == "module"] == [""]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 500),
            st.integers(0, 80),
            st.sampled_from(["aten::mm", "aten::add", "frame"]),
        ),
        max_size=30,
    )
)
def test_gaps_and_durations_are_never_negative_however_events_lie(spans):
    root = _call("", "Model")
    events = [
        Event(name, "op", 1, start, start + length, id=at)
        for at, (start, length, name) in enumerate(spans)
    ]
    events += [
        Event("llmdebug 0", "mark", 1, 0, 5, mark=0),
        Event("llmdebug 1", "mark", 1, 600, 610, mark=1),
    ]
    found = _timed(events, {0: [ProfilerMark(True, root)], 1: [ProfilerMark(False, root)]})
    assert all(row[7] >= 0 and (row[8] is None or row[8] >= 0) for row in found.timings)
    assert all(row[9] >= 0 for row in found.launches)
    assert len(found.launches) <= sum(name == "aten::mm" for _, _, name in spans)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ("kernels", "op, kernel, host, tiling"),
        ("host+", "''|known"),
        (7, "7"),
        ([], r"\[\]"),
        ("host+tiling", "graph='fused'"),
    ],
)
def test_a_profile_that_makes_no_sense_is_one_readable_line(given_, said):
    with pytest.raises(ld.errors.OptionError, match=said) as error:
        DumpOptions(profile=given_)
    assert "\n" not in str(error.value)


def test_without_a_profile_there_are_no_times_and_no_ranges(tmp_path):
    model = nn.Linear(2, 2)
    with ld.dump(model, name="n", path=tmp_path) as run:
        model(torch.ones(1, 2))
    assert len(run.host()) == len(run.kernels()) == len(run.tiling()) == 0
    assert len(run.ops()) == 1


# -- the dump -------------------------------------------------------------------------------------


def test_a_dump_made_before_there_were_times_opens_and_has_none(run, tmp_path):
    old = shutil.copytree(run.path, tmp_path / "old")
    for table in ("timings", "launches", "tilings"):
        change_index(old, f"DROP TABLE {table}")
    opened = ld.open_run(old)
    assert len(opened) == len(run)
    assert len(opened.host()) == len(opened.kernels()) == 0


def test_a_dump_with_nonsense_in_its_tables_is_read_or_refused_in_one_line(run, tmp_path):
    for number, change in enumerate(
        ("timings SET start = 'x'", "launches SET duration = x'00ff'",
            "timings SET path = NULL, op = 7", "launches SET inputs = '[[1]]', kernel = NULL")
    ):  # fmt: skip
        bad = shutil.copytree(run.path, tmp_path / str(number))
        change_index(bad, f"UPDATE {change}")
        opened = ld.open_run(bad)
        if number < 2:
            with pytest.raises(ld.errors.CorruptDumpError, match="Expected `"):
                ld.timeline(opened)
            with pytest.raises(ld.errors.CorruptDumpError, match="Expected `"):
                ld.write_tables(opened, tmp_path / "csv")
        else:
            assert "<img" in html.timeline_fragment(ld.timeline(opened))
            assert ld.write_tables(opened, tmp_path / f"csv{number}")


def test_two_processes_have_their_times_in_one_run(run, tmp_path):
    both = shutil.copytree(run.path, tmp_path / "both")
    first = next(both.glob("rank*"))
    add_process(both, "rank1_77")
    opened = ld.open_run(both)
    assert dict(opened.host().groupby("rank").size()) == {0: len(run.host()), 1: len(run.host())}
    written = ld.write_tables(opened, tmp_path / "csv")
    assert {path.parent.name for path in written} == {first.name.rpartition("_")[2], "77"}


def test_a_second_process_of_a_rank_goes_on_counting_and_its_files_have_its_number(run, tmp_path):
    both = shutil.copytree(run.path, tmp_path / "both")
    first = next(both.glob("rank*"))
    add_process(both, "rank0_99999999")
    opened = ld.open_run(both)
    rows = len(run.host())
    assert dict(opened.host().groupby("generation").size()) == {0: rows, 1: rows}
    written = ld.write_tables(opened, tmp_path / "csv")
    names = {f"{path.parent.name}/{path.name}" for path in written}
    assert f"{first.name.rpartition('_')[2]}/operation_statistic_1.csv" in names
    assert "99999999/operation_statistic_1_1.csv" in names


def test_calls_have_their_execution_id_in_every_table(run):
    ids = run.ids(1)
    for table in (run.ops(), run.host().query("level == 'module'")):
        for row in table.query("step == 1").itertuples():
            assert row.id == ids[row.path, row.call]
    assert set(run.kernels()["id"]) == {""}


def test_a_reduced_run_keeps_its_times(run):
    small = ld.reduce_run(run)
    pandas.testing.assert_frame_equal(small.host(), run.host())
    pandas.testing.assert_frame_equal(small.kernels(), run.kernels())


# -- tables ---------------------------------------------------------------------------------------


def _read(path, separator):
    with open(path, newline="", encoding="utf-8") as file:
        if separator == "|":
            return list(csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE))
        return list(csv.DictReader(file))


def test_tables_have_upstreams_places_and_hold_the_recorded_calls(run, tmp_path):
    written = ld.write_tables(run, tmp_path)
    pid = run.source.processes[0]["pid"]
    kinds = [
        ("operation_io_tensors", "operation_tensors"),
        ("kernel_io_tensors", "kernel_tensors"),
        ("cpu_profiling", "operation_statistic"),
    ]
    places = [
        tmp_path / folder / str(pid) / f"{name}_{step}.csv"
        for folder, name in kinds
        for step in (0, 1)
    ]
    assert written == places
    ops = _read(places[0], "|")
    assert tuple(ops[0]) == tables.OP_COLUMNS
    assert len(ops) == len(
        {(r.site.path, r.site.call) for r in run.records(step=0, role=("input", "output"))}
    )
    linear = next(row for row in ops if row["OpName"] == "model.layers.0.mlp.up_proj")
    assert (linear["CaseName"], linear["InDType"], linear["InFormat"], linear["InShape"],
        linear["OutShape"]) == (
        "Linear", "float32", "nd", "1,7,32", "1,7,64",
    )  # fmt: skip
    assert json.loads(linear["OpParam"])["in_features"] == "32"
    kernels = _read(places[2], "|")
    assert len(kernels) == len(run.kernels().query("step == 0"))
    lookup = next(row for row in kernels if row["OpName"] == "aten::embedding")
    assert (lookup["InDType"], lookup["InShape"]) == ("float32;int64", "96,32;1,7")
    statistics = _read(places[4], ",")
    columns = list(statistics[0])
    assert columns[0] == "opname"
    assert columns[1:] == sorted(columns[1:])
    assert all(name.startswith(("execute_", "setup_")) for name in columns[1:])
    assert len(statistics) == len(run.host().query("step == 0"))


_texts = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"), max_size=20
)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(_texts, _texts, st.dictionaries(_texts, _texts, max_size=3),
            st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3)),
        max_size=4,
    )
)  # fmt: skip
def test_whatever_names_and_parameters_are_a_table_reads_back_as_it_was_written(
    tmp_path_factory, cases
):
    rows = [
        {
            "path": path,
            "call": 0,
            "op": op,
            "parameters": said,
            "in_dtype": ["int8"] * len(shapes),
            "in_shape": shapes,
            "out_dtype": [],
            "out_shape": [],
        }
        for path, op, said, shapes in cases
    ]
    path = tables._write(
        tmp_path_factory.mktemp("t") / "t.csv", tables.OP_COLUMNS, tables._ops(rows, "M"), "|"
    )
    back = _read(path, "|")
    assert [(row["OpName"], row["CaseName"], json.loads(row["OpParam"])) for row in back] == [
        (tables._plain(path or "M"), tables._plain(op), said) for path, op, said, _ in cases
    ]
    assert [row["InShape"] for row in back] == [
        ";".join(",".join(map(str, shape)) for shape in shapes) for *_, shapes in cases
    ]


def test_a_run_without_tables_and_an_impossible_folder_are_errors_of_one_line(run, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ld.errors.StoreError, match="can't write"):
        ld.write_tables(run, tmp_path / "file")
    with pytest.raises(ld.errors.UnknownRunError):
        ld.write_tables("nowhere", tmp_path)


# -- timeline -------------------------------------------------------------------------------------


def test_a_timeline_names_the_slowest_operators_and_the_longest_gaps(tmp_path):
    model = Slow()
    with torch.no_grad(), ld.dump(model, name="s", path=tmp_path, profile="kernel+host") as run:
        model(torch.ones(2, 8))
    shown = ld.timeline(run)
    assert shown.gaps.iloc[0]["path"] == "/Aten.relu"
    assert set(shown.top["op"]) == {"Aten.linear", "Aten.relu"}
    assert shown.top["share"].sum() == pytest.approx(1)
    assert "/Aten.relu" in repr(shown)
    assert "<img" in html.timeline_fragment(shown)
    labels = [tick.get_text() for tick in shown.figure.axes[0].get_yticklabels()]
    assert labels == ["modules", "", "host ops", "kernels cpu"]
    assert shown.save(tmp_path / "t.svg").stat().st_size > 1000
    trace = json.loads(shown.save(tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert len(trace) == len(shown.host) + len(shown.kernels)
    with pytest.raises(ld.errors.OptionError, match=r"\.png"):
        shown.save(tmp_path / "t.txt")


def test_the_page_of_a_run_with_times_shows_them_and_that_of_another_does_not(run, tmp_path):
    assert "<h2>Times</h2>" in html.page(RunView(run))
    model = nn.Linear(2, 2)
    with ld.dump(model, name="n", path=tmp_path) as plain:
        model(torch.ones(1, 2))
    assert "<h2>Times</h2>" not in html.page(RunView(plain))


def test_a_timeline_of_kernels_alone_and_one_of_nothing(tmp_path):
    model = nn.Linear(2, 2)
    with ld.dump(model, name="k", path=tmp_path, profile="kernel") as run:
        model(torch.ones(1, 2))
    assert list(ld.timeline(run).top["kernel"]) == ["aten::addmm"]
    assert "kernels" in html.timeline_fragment(ld.timeline(run))
    with pytest.raises(ld.errors.TensorLookupError, match="step 7"):
        ld.timeline(run, step=7)
    with ld.dump(model, name="n", path=tmp_path) as plain:
        model(torch.ones(1, 2))
    with pytest.raises(ld.errors.TensorLookupError, match="profile="):
        ld.timeline(plain)


def test_the_command_line_writes_tables_and_prints_a_timeline(run, tmp_path, capsys):
    assert main(["tables", str(run.path), "-o", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").rglob("*.csv"))) == 6
    assert main(["timeline", str(run.path), "--step", "1", "-o", str(tmp_path / "t.png")]) == 0
    assert "most time" in capsys.readouterr().out
    assert main(["timeline", str(run.path), "--step", "9"]) == 3
    assert "no times of step 9" in capsys.readouterr().err


# -- ONNX Runtime ---------------------------------------------------------------------------------


def test_the_profile_of_onnx_runtime_has_each_node_once_a_run(tmp_path):
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="mm"),
        helper.make_node("Relu", ["y"], ["z"], name="act"),
    ]
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xz")
    w = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], np.eye(3, dtype="f").ravel())
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [z], [w]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "ort")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for _ in range(3):
        session.run(None, {"x": np.ones((2, 3), "f")})
    table = ort_kernels(session.end_profiling())
    assert [(row.step, row.path, row.op, row.device) for row in table.itertuples()] == [
        (step, path, op, "cpu")
        for step in range(3)
        for path, op in (("/mm", "MatMul"), ("/act", "Relu"))
    ]
    assert (table["start"] >= 0).all()
    assert table.loc[0, ["in_dtype", "in_shape", "out_shape"]].tolist() == [
        ["float32"],
        [(2, 3)],
        [(2, 3)],
    ]


def test_the_nodes_of_a_recorded_session_have_their_times(tmp_path):
    import numpy as np
    import onnxruntime

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch.onnx.export(
        model, (torch.ones(3, 4),), str(tmp_path / "m.onnx"), dynamo=True, verbose=False
    )
    session = onnxruntime.InferenceSession(
        str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: np.ones((3, 4), "f")}
    plain = session.run(None, feed)[0]
    with ld.dump(
        session, name="o", path=tmp_path, mode="module+aten", profile="op+kernel+host"
    ) as run:
        seen = [session.run(None, feed)[0] for _ in range(3)]
    assert all((one == plain).all() for one in seen)
    recorded = {(row.step, row.path, row.call) for row in run.operators().itertuples()}
    kernels = run.kernels()
    assert {(row.step, row.path, row.call) for row in kernels.itertuples()} == recorded
    assert len(kernels) == len(recorded) > 0
    assert (kernels["duration"] >= 0).all()
    assert set(ld.timeline(run, step=2).top["kernel"]) == set(kernels["kernel"])
    assert any("host times are not taken" in note for note in run.meta["notes"])


def _node(**changes):
    return {
        "cat": "Node",
        "name": "n_kernel_time",
        "ts": 5,
        "dur": 2,
        "args": {"op_name": "Add", "provider": "CUDAExecutionProvider"},
        **changes,
    }


def test_a_profile_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(
        "[" + json.dumps(_node()) + ",\n" + json.dumps(_node(ts=9)) + ",\n", encoding="utf-8"
    )
    rows = ort_profile.launches(file)
    assert [(row[1], row[6], row[8]) for _, row in rows] == [(0, "cuda", 5000), (1, "cuda", 9000)]


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "null", "[" * 100_000, json.dumps([_node(ts="now")]),
        json.dumps([_node(dur=True)]), '[{"cat":"Node","name":"a_kernel_time","ts":NaN,"dur":1}]',
     json.dumps([_node(ts=1e300)]), json.dumps([_node(ts=None)]), "\x00\xff"],
)  # fmt: skip
def test_an_invalid_profile_of_onnx_runtime_is_an_error_that_names_the_file(text, tmp_path):
    file = tmp_path / "bad.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ld.errors.CorruptDumpError, match=r"bad\.json"):
        ort_kernels(file)
    with pytest.raises(ld.errors.CorruptDumpError, match="no such file"):
        ort_kernels(tmp_path / "none.json")


_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.sampled_from(["Node",
        "Session", "model_run", "x_kernel_time"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["cat", "name",
        "ts", "dur", "args", "provider", "op_name"]), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(_json, max_size=5))
def test_any_json_is_read_or_refused(tmp_path_factory, events):
    file = tmp_path_factory.mktemp("o") / "o.json"
    file.write_text(json.dumps(events), encoding="utf-8")
    try:
        rows = ort_profile.launches(file)
    except ld.errors.CorruptDumpError:
        return
    assert all(len(row) == len(LAUNCHES.names) - 2 and row[9] >= 0 for _, row in rows)
