"""Comparing on a Dask cluster: the same bits, and nothing lost, whatever the workers do."""

import contextlib
import functools
import os
import signal
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb import errors
from llmdebug_nb.app.cluster import worker
from llmdebug_nb.app.cluster.cluster import Cluster, connected
from llmdebug_nb.app.cluster.dispatch import Dispatch
from llmdebug_nb.core import constants

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore:.*VersionMismatchWarning.*")

STEPS = 3


def _model(scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]).eval()
    with torch.no_grad():
        model[2][0].weight.mul_(scale)
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in one weight, by name."""
    folder = tmp_path_factory.mktemp("runs")
    for name, scale in (("golden", 1.0), ("mine", 1.01)):
        model = _model(scale)
        with ld.dump(model, name=name, path=folder, mode="api"):
            for step in range(STEPS):
                model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
    return folder / "golden", folder / "mine"


@contextlib.contextmanager
def _with_this_file(patch):
    """Let workers that are started now import this file."""
    folders = [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    yield


@pytest.fixture(scope="module")
def client():
    """Two workers on this machine, each a process of its own."""
    from distributed.deploy.subprocess import SubprocessCluster

    with (
        pytest.MonkeyPatch.context() as patch,
        _with_this_file(patch),
        SubprocessCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        yield client


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(constants, "BATCH_JOBS", 2)


def _rows(report):
    return [(d.verdict, d.error, d.limit, d.metrics, d.reason) for d in report.differences]


@functools.cache
def _here(golden, mine):
    report = ld.compare(golden, mine, progress=False)
    assert report.verdict == "diverged"
    return _rows(report), [finding.path for finding in report.findings]


def _is_that_of_this_process(report, runs):
    return (_rows(report), [finding.path for finding in report.findings]) == _here(*runs)


def test_workers_measure_the_bits_of_this_process(runs, client, small_batches):
    report = ld.compare(*runs, cluster=client, progress=False)
    assert _is_that_of_this_process(report, runs)
    assert not report.problems
    assert client.status == "running"  # it is the caller's


def test_an_address_is_a_cluster_and_so_is_the_command_line(runs, client, capsys):
    from llmdebug_nb.cli import main

    address = client.scheduler.address
    assert _is_that_of_this_process(ld.compare(*runs, cluster=address, progress=False), runs)
    assert main(["compare", *map(str, runs), "--cluster", address]) == 1
    assert "diverged" in capsys.readouterr().out


def test_the_magic_takes_an_address_and_a_variable(runs, client):
    shell = InteractiveShell.instance()
    try:
        shell.run_line_magic("load_ext", "llmdebug_nb")
        shell.user_ns["workers"] = client
        for cluster in (client.scheduler.address, "workers"):
            line = f"{runs[0]} {runs[1]} -l error --cluster {cluster}"
            report = shell.run_line_magic("llmcompare", line)
            assert _is_that_of_this_process(report, runs)
            assert not report.problems
        with pytest.raises(UsageError, match="'nobody' is no cluster"):
            shell.run_line_magic("llmcompare", f"{runs[0]} {runs[1]} --cluster nobody")
        shell.run_line_magic("unload_ext", "llmdebug_nb")
    finally:
        InteractiveShell.clear_instance()


def test_local_starts_workers_and_ends_them(runs, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    report = ld.compare(*runs, cluster="local", progress=False)
    assert _is_that_of_this_process(report, runs)
    assert not report.problems


def test_operators_are_checked_on_workers_with_the_same_result(runs, client, tmp_path):
    here = ld.opcheck(runs[0], output=tmp_path / "here", progress=False)
    there = ld.opcheck(runs[0], output=tmp_path / "there", progress=False, cluster=client)
    assert here.result.checked
    assert there.result.calls == here.result.calls
    assert not there.result.notes
    with pytest.raises(errors.OptionError, match="not both"):
        ld.opcheck(runs[0], output=tmp_path, progress=False, cluster=client, jobs=2)


def test_a_run_of_this_process_alone_is_measured_here(client):
    from llmdebug_nb.app.cluster.measuring import on_cluster
    from llmdebug_nb.comparison.threads import in_threads
    from llmdebug_nb.store import reader
    from llmdebug_nb.store.layouts import Contents

    run = reader.in_memory("x", Contents([], [], [], torch.zeros), 0)
    cluster = Cluster(client)
    assert on_cluster(cluster, run, run) is in_threads
    assert cluster.notes() == [
        "cluster: 1 of 1 tasks were done in this process: the tensors of a run are in this"
        " process alone"
    ]


# -- workers that can't do it ----------------------------------------------------------------------


def _hide(hidden):
    """On a worker: let runs be absent, as without the file system."""
    from llmdebug_nb.app.cluster import worker
    from llmdebug_nb.store import catalog

    worker._opened.cache_clear()
    if not hasattr(catalog, "kept"):
        catalog.kept = catalog.read_marker

    def absent(folder):
        raise errors.CorruptDumpError(f"{folder} is damaged: No such file or directory")

    catalog.read_marker = absent if hidden else catalog.kept


def test_a_worker_without_the_file_system_gets_nothing_and_is_named(runs, client, small_batches):
    first, *_ = client.nthreads()
    try:
        client.run(_hide, True, workers=[first])
        report = ld.compare(*runs, cluster=client, progress=False)
        assert _is_that_of_this_process(report, runs)
        (note,) = report.problems
        assert note.startswith("cluster: 1 worker could not take part: ")
        assert "No such file" in note
        client.run(_hide, True)
        report = ld.compare(*runs, cluster=client, progress=False)
        assert _is_that_of_this_process(report, runs)
        left, done = report.problems
        assert left.startswith("cluster: 2 workers could not take part: ")
        assert done.endswith("done in this process: no worker was left that can do the work")
    finally:
        client.run(_hide, False)


def _say_version(version):
    """On a worker: state another version of the package."""
    from llmdebug_nb.app.cluster import worker

    if not hasattr(worker, "kept"):
        worker.kept = worker.versions
    worker.versions = worker.kept
    if version:
        worker.versions = lambda: worker.kept() | {"llmdebug_nb": version}


def test_workers_of_another_version_are_refused(runs, client):
    first, *_ = client.nthreads()
    try:
        client.run(_say_version, "0.0.9", workers=[first])
        report = ld.compare(*runs, cluster=client, progress=False)
        assert _is_that_of_this_process(report, runs)
        assert "llmdebug_nb 0.0.9 against " in report.problems[0]
        client.run(_say_version, "0.0.9")
        with pytest.raises(
            errors.ClusterError, match=r"none of 2 workers has .* llmdebug_nb 0\.0\.9"
        ):
            ld.compare(*runs, cluster=client, progress=False)
    finally:
        client.run(_say_version, None)


def _lacks_the_package(lacks):
    """On a worker: let the module of the work be absent, as if nothing was installed."""
    if lacks:
        sys.modules["llmdebug_nb.app.cluster.worker"] = None
    else:
        del sys.modules["llmdebug_nb.app.cluster.worker"]


def test_workers_without_the_package_are_refused(runs, client):
    try:
        client.run(_lacks_the_package, True)
        with pytest.raises(errors.ClusterError, match=r"none of 2 workers .*ModuleNotFoundError"):
            ld.compare(*runs, cluster=client, progress=False)
    finally:
        client.run(_lacks_the_package, False)


@pytest.mark.parametrize(
    ("cluster", "kind", "says"),
    [
        ("tcp://127.0.0.1:9", errors.ClusterError, "nobody listens at tcp://127.0.0.1:9"),
        ("tcp://no-such-host.invalid:8786", errors.ClusterError, "nobody listens"),
        ("nonsense", errors.OptionError, "'nonsense' is no cluster; expected 'local'"),
        ("tcp://host", errors.OptionError, "is no cluster"),
        (17, errors.OptionError, "17 is no cluster"),
    ],
)
def test_a_cluster_that_is_not_there_is_said_at_once(runs, cluster, kind, says):
    with pytest.raises(kind, match=says):
        ld.compare(*runs, cluster=cluster, progress=False)


def test_a_scheduler_without_workers_is_said(runs, monkeypatch):
    monkeypatch.setattr(constants, "CLUSTER_CONNECT", 1.0)
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=":0", silence_logs=50) as empty,
        pytest.raises(errors.ClusterError, match="has had no worker for 1 s"),
    ):
        ld.compare(*runs, cluster=empty.scheduler_address, progress=False)


# -- workers that fail on the way ------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A task."""

    value: int
    nbytes: int = 0


def _squared(number):
    return number.value**2


def _dispatched(client, remote, here=_squared, count=6):
    cluster = Cluster(client)
    tasks = [Number(each) for each in range(count)]
    found = {task.value: result for task, result in Dispatch(cluster, remote, here).results(tasks)}
    assert found == {task.value: _squared(task) for task in tasks}
    return cluster


def _once(folder, what, number):
    """On a worker: fail at number 2, when it comes for the first time."""
    if number.value == 2 and not (folder / "failed").exists():
        (folder / "failed").touch()
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(30)
        raise MemoryError
    return number.value**2


def _always(number):
    if number.value == 2:
        raise MemoryError("this machine has too little")
    return number.value**2


def test_a_killed_worker_loses_nothing(client, tmp_path):
    cluster = _dispatched(client, functools.partial(_once, tmp_path, "die"))
    assert not cluster.here
    assert (tmp_path / "failed").exists()


def test_what_fails_on_every_worker_is_done_here_and_said(client):
    cluster = _dispatched(client, _always)
    assert cluster.notes() == [
        "cluster: 1 of 6 tasks were done in this process: MemoryError: this machine has too little"
    ]


def test_a_worker_that_came_later_and_is_unfit_gets_no_more(client):
    def unfit(number):
        raise worker.UnfitError(distributed.get_worker().address, "another version")

    cluster = _dispatched(client, unfit)
    assert set(cluster.unfit.values()) == {"another version"}
    assert cluster.here == {"no worker was left that can do the work": 6}


def test_a_scheduler_that_ends_loses_nothing(monkeypatch):
    monkeypatch.setattr(constants, "CLUSTER_CONNECT", 3.0)
    local = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0",
        silence_logs=50, protocol="tcp://",
    )  # fmt: skip
    with connected(local.scheduler_address, progress=False) as cluster:
        dispatch = Dispatch(cluster, _squared, _squared)
        results = dispatch.results([Number(each) for each in range(20)])
        found = dict([next(results)])
        local.close()
        found |= dict(results)
        assert {task.value: result for task, result in found.items()} == {
            each: each**2 for each in range(20)
        }


def test_an_interrupt_takes_all_tasks_back(client):
    def slow(number):
        time.sleep(0.2)
        return number.value

    class Interrupt(KeyboardInterrupt):
        pass

    dispatch = Dispatch(Cluster(client), slow, slow)
    results = dispatch.results([Number(each) for each in range(100)])
    next(results)
    with pytest.raises(Interrupt):
        results.throw(Interrupt())
    assert not dispatch._flying
    deadline = time.monotonic() + 30
    while any(client.processing().values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_worker_that_hangs_gets_no_more(client, tmp_path, monkeypatch):
    client.wait_for_workers(2, timeout=60)
    client.run(_squared, Number(1))  # the imports are over, however slow the machine is
    monkeypatch.setattr(constants, "CLUSTER_PATIENCE", 5.0)
    cluster = _dispatched(client, functools.partial(_once, tmp_path, "hang"))
    assert list(cluster.unfit.values()) == ["a worker gave no answer in time"]
    assert not cluster.here
