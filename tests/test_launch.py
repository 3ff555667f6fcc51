"""Programs that nobody edits: launched, recorded in all their processes, and left as they are."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.launching import arguments, children, program
from llmdebug_nb.app.launching.environment import is_python
from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.app.launching.shared import SharedRecording
from llmdebug_nb.cli import main
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store.writer import create_run
from models import generate, llama

HERE = Path(__file__).parent
ROOT = HERE.parent
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a folder to launch programs from; their runs go into the test's runs folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


DUMP = [sys.executable, "-m", "llmdebug_nb.cli", "dump"]


def _write(name, text):
    """Write a file of the current folder, mostly a program."""
    Path(name).write_text(text, encoding="utf-8")


def _dump(*arguments, **more):
    """Run ``llmdebug dump`` as a user does."""
    return subprocess.run(
        [*DUMP, *arguments], capture_output=True, encoding="utf-8", check=False, timeout=120, **more
    )


def _inputs(run):
    """Return rank, generation, step and number of rows of each call of the root."""
    frame = run.to_pandas()
    frame = frame[(frame.path == "") & (frame.role == "input") & (frame.phase == "forward")]
    return [(r.rank, r.generation, r.step, r.shape[0]) for r in frame.itertuples()]


# -- programs as people have them ------------------------------------------------------------------


def test_a_generate_script_is_recorded_by_token_with_its_arguments_output_and_status(here):
    _write(
        "a program.py",
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from models import generate, llama\n"
        "print(sys.argv[1:], sys.stdin.read()); print(generate(llama(), new=4).tolist()); "
        "print('e', file=sys.stderr)\n"
        "sys.exit(3)",
    )
    line = """python 'a program.py' "a b" "'c'" """
    done = _dump("--exec", line, "--name", "g", "-er", "0,1", input="typed")
    assert done.returncode == 3
    assert done.stdout == f"""['a b', "'c'"] typed\n{generate(llama(), new=4).tolist()}\n"""
    assert done.stderr.startswith("e\nllmdebug: g: ")
    run = ld.open_run("g")
    kinds = "prefill", "decode", "decode", "decode"
    assert [(c.step, c.kind) for c in run.root_calls()] == list(enumerate(kinds))
    assert sorted(set(run.to_pandas().step)) == [0, 1, 2]  # rounds 0 and 1
    assert f"{len(run):,} tensors" in done.stderr
    assert "0 prefill (round 0), 1 decode (round 0), 2 decode (round 1)" in RunView(run).text()


def test_two_ranks_of_torchrun_are_two_ranks_of_one_run_with_the_paths_of_the_model_itself(here):
    _write(
        "train.py",
        MODEL
        + """
import torch.distributed as dist
dist.init_process_group("gloo")
spread = nn.parallel.DistributedDataParallel(model)
spread(torch.ones(dist.get_rank() + 1, 3)).sum().backward()
dist.destroy_process_group()
""",
    )
    done = ld.launch("torchrun --nproc-per-node 2 train.py", name="ddp")
    assert done.status == 0
    run = done.run
    info = run.info()
    assert (info["ranks"], info["processes"], info["complete"]) == ([0, 1], 2, True)
    assert _inputs(run) == [(0, 0, 0, 1), (1, 0, 0, 2)]
    assert [node.path for node in run.nodes] == ["", "0", "1"]
    gradients = [
        run.tensor("0", role="grad", slot="weight", phase="backward", rank=rank) for rank in (0, 1)
    ]
    assert all(g.shape == (3, 3) for g in gradients)


def test_a_script_that_starts_python_twice_makes_one_run_whose_generations_count_on(here):
    _write("call.py", MODEL + "import sys\nmodel(torch.ones(len(sys.argv[1]), 3))")
    _write(
        "run.sh", 'python call.py "$1"\nPYTHONPATH=/nowhere python3 call.py x\n'
    )  # the shim puts it back
    done = ld.launch(["bash", "run.sh", "a b"], name="r")
    assert _inputs(done.run) == [(0, 0, 0, 3), (0, 1, 0, 1)]
    assert done.run.info()["processes"] == 2
    assert [(c.generation, c.step) for c in done.run.steps()] == [(0, 0), (1, 0)]


def test_workers_of_a_loader_record_nothing_and_forked_and_spawned_processes_what_they_run(here):
    _write(
        "load.py",
        MODEL
        + """
import multiprocessing, os, sys
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        with torch.no_grad():
            return model(torch.ones(3))

def work(rows):
    model(torch.ones(rows, 3))

if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        model(batch)
    for way, rows in (("fork", 4), ("spawn", 5)):
        process = multiprocessing.get_context(way).Process(target=work, args=(rows,))
        process.start()
        process.join()
    if os.fork() == 0:
        work(6)
        sys.exit()
    os.wait()
    model(torch.ones(7, 3))
""",
    )
    done = ld.launch("python load.py", name="r", tokens="all")
    of_workers = [(0, n, 0, rows) for n, rows in enumerate((4, 5, 6), 1)]
    assert _inputs(done.run) == [(0, 0, 0, 2), (0, 0, 1, 7), *of_workers]
    assert all(process["complete"] for process in done.run.source.processes)


def test_what_a_program_computes_is_bit_for_bit_what_it_computes_alone(here):
    _write(
        "train.py",
        MODEL
        + """
import hashlib, random
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    torch.dropout(model(torch.randn(4, 3)), 0.5, True).sum().backward()
    optimizer.step()
state = [p.detach().numpy().tobytes() for p in model.parameters()]
state += [torch.get_rng_state().numpy().tobytes()]
print(hashlib.sha256(b"".join(state)).hexdigest(), torch.nn.Module.__call__.__qualname__)
""",
    )
    plain = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, encoding="utf-8", check=True
    ).stdout
    recorded = _dump("--mode", "module+api+aten", "-time", "2", "--", "python", "train.py")
    assert recorded.stdout == plain


def test_topology_and_tables_are_written_in_the_places_of_msits_with_a_row_for_each_call(here):
    import onnx

    _write("call.py", MODEL + "given = torch.ones(1, 3); model(given); model(given)")
    options = "--name r -er 0,1 --type model onnx op kernel cpu_profiling"
    done = _dump("--exec", "python call.py", *options.split())
    assert "files in the places of msit's: 2 in model/" in done.stderr
    run = ld.open_run("r")
    assert {path.stat().st_mode & 0o777 for path in run.path.rglob("*")} <= {0o600, 0o700}
    ids = done.stderr.partition("execution ids, for -ids:\n")[2]
    assert set(run.ids().values()) - {""} <= set(ids.split())
    pid = run.source.processes[0]["pid"]
    files = {
        str(file.relative_to(run.path))
        for file in run.path.rglob("*.*")
        if str(pid) in file.parent.name
    }
    files -= {f"rank0_{pid}/index.sqlite", f"rank0_{pid}/tensors.bin"}
    tables = ("operation_io_tensors/{}/operation_tensors", "kernel_io_tensors/{}/kernel_tensors",
        "cpu_profiling/{}/operation_statistic")  # fmt: skip
    expected = {f"{table.format(pid)}_{step}.csv" for table in tables for step in (0, 1)}
    layers = ("0", "1")
    expected |= {
        f"{what}.{end}"
        for what in [f"model/{pid}/Sequential", *(f"layer/{pid}/{n}" for n in layers)]
        for end in ("json", "onnx")
    }
    assert files == expected
    assert run.info()["payloads"] == 0
    with torch.profiler.profile() as seen:  # what PyTorch itself says is computed
        nn.Sequential(nn.Linear(3, 3), nn.ReLU())(torch.ones(1, 3))
    computed = [e.name for e in seen.events() if e.name in ("aten::addmm", "aten::relu")]
    for step in (0, 1):
        lines = (
            (run.path / f"operation_io_tensors/{pid}/operation_tensors_{step}.csv")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        assert len(lines) - 1 == 3 + len(computed)  # the model and its two modules
    onnx.checker.check_model(onnx.load(run.path / f"model/{pid}/Sequential.onnx"))


def _save_tiny(file):
    """Write a graph of two nodes: y = relu(2 x), of float32[1, 3]."""
    import numpy as np
    import onnx
    from onnx import helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3]) for name in "xy"]
    weight = onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32) * 2, "w")
    graph = helper.make_graph(nodes, "tiny", ends[:1], ends[1:], [weight])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9),
        file,
    )


@pytest.mark.parametrize("before", ["", "import importlib.util as u; u.find_spec('onnxruntime')\n"])
def test_a_session_of_onnx_runtime_is_recorded_from_its_first_run_without_torch_in_the_program(
    here, before
):
    _save_tiny(here / "tiny.onnx")
    _write(
        "run.py",
        f"{before}import numpy as np, onnxruntime\n"
        "session = onnxruntime.InferenceSession('tiny.onnx')\n"
        "print([session.run(None, {'x': np.full((1, 3), n, np.float32)})[0].tolist()"
        " for n in range(3)])",
    )
    done = _dump("--name", "r", "-er", "1,2", "--", "python", "run.py")
    assert done.stdout == "[[[0.0, 0.0, 0.0]], [[2.0, 2.0, 2.0]], [[4.0, 4.0, 4.0]]]\n"
    run = ld.open_run("r")
    assert set(run.to_pandas().step) == {1, 2}
    assert run.tensor("/Onnx.Relu", step=2).tolist() == [[4.0, 4.0, 4.0]]


def test_a_runtime_that_is_imported_while_the_recording_runs_is_recorded_too(here):
    _save_tiny(here / "tiny.onnx")
    _write(
        "run.py",
        f"{MODEL}model(torch.ones(1, 3))\nimport numpy as np, onnxruntime\n"
        "session = onnxruntime.InferenceSession('tiny.onnx')\n"
        "print(session.run(None, {'x': np.ones((1, 3), np.float32)})[0].tolist())",
    )
    done = _dump("--name", "r", "--tokens", "all", "--", "python", "run.py")
    assert done.stdout == "[[2.0, 2.0, 2.0]]\n"
    assert {"Sequential", "Onnx.Relu"} <= set(ld.open_run("r").to_pandas().op)


def test_a_recording_and_its_launcher_load_only_what_they_need(here):
    _write("run.py", f"{MODEL}model(torch.ones(1, 3))\nimport sys; print(*sys.modules)")
    code = (
        "import sys; from llmdebug_nb.cli import main\n"
        "main(['dump', '-sd', '--', sys.executable, 'run.py']); print(*sys.modules)"
    )
    inside, launcher = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    ours = "llmdebug_nb."
    assert {"torch", f"{ours}capture.recorder"} <= set(inside.split())
    others = {
        "app.errcheck", "app.runs", "capture.alarms", "capture.compat.llamacpp_api",
        "capture.compat.onnxruntime_api", "capture.compat.openvino_api", "capture.empty_dump",
        "capture.operators.modes", "capture.timing.profiler", "comparison.differences", "store.run",
    }  # fmt: skip
    assert not {f"{ours}{name}" for name in others}.intersection(inside.split())
    assert not {"msgspec", "numpy", "sqlite3", "difflib"}.intersection(launcher.split())
    assert len(ld.runs()) == 1


def test_a_program_that_looks_for_torch_before_it_imports_it_is_recorded(here):
    _write(
        "look.py",
        "import importlib.util\n"
        "assert all(importlib.util.find_spec('torch') for _ in range(3))\n"
        f"{MODEL}model(torch.ones(1, 3))",
    )
    done = ld.launch(["python", "look.py"], name="r", rounds="0,0")
    assert done.status == 0
    assert _inputs(done.run) == [(0, 0, 0, 1)]


def test_ids_that_no_call_has_are_named_beside_the_ones_that_exist(here):
    _write("run.py", f"{MODEL}model(torch.ones(1, 3))")
    done = ld.launch(["python", "run.py"], name="r", rounds="0,0", ids="3")
    (line,) = done.lines("warning")
    assert "ids '3'" in line
    assert "0 to 1 in the root" in line
    assert "never came" not in line


# -- what can't be reached, and what ends early ---------------------------------------------------


def test_a_python_that_could_not_be_reached_is_named_with_the_reason(here):
    _write("call.py", MODEL + "model(torch.ones(1, 3)); import time; time.sleep(1)")
    program = f"{shlex.quote(sys.executable)} call.py"
    overwritten = f"PYTHONPATH=/nowhere {program}"
    done = ld.launch(["bash", "-c", f"{overwritten}; exit 5"], name="r")
    assert (done.status, done.path) == (5, None)
    assert any(f"{program}: PYTHONPATH was overwritten" in line for line in done.lines())
    isolated = ld.launch(["python", "-I", "call.py"], name="r")
    assert any(
        "-I (isolated mode)" in line and "--pth" in line for line in isolated.lines("warning")
    )


def test_a_pth_file_reaches_an_isolated_python_and_is_gone_afterwards(here):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", "own"], check=True
    )
    site = next((here / "own").glob("lib/python*/site-packages"))
    for place in sys.path:  # the packages of this environment, which a venv of a venv does not see
        if place.endswith("site-packages"):
            (site / "beside.pth").write_text(place + "\n", encoding="utf-8")
    _write(
        "call.py", MODEL + f"import os; print(os.listdir({str(site)!r})); model(torch.ones(1, 3))"
    )
    done = ld.launch(["own/bin/python", "-I", "call.py"], name="r", pth=True)
    assert len(_inputs(done.run)) == 1
    assert [file.name for file in site.iterdir()] == ["beside.pth"]


def _plugin():
    """Return the module and the function that vLLM calls in each of its processes."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"vllm\.general_plugins"\]\nllmdebug = "(.+):(.+)"', project)
    assert found is not None
    return found.groups()


def test_the_plugin_of_vllm_reaches_an_isolated_python(here):
    module, function = _plugin()
    _write(
        "call.py",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{MODEL}from {module} import {function}\n"
        f"{function}(); {function}(); model(torch.ones(1, 3))",
    )
    done = ld.launch(["python", "-I", "call.py"], name="r")
    assert len(_inputs(done.run)) == 1
    # a process that the hook reaches is recorded once, too
    assert len(_inputs(ld.launch(["python", "call.py"], name="both").run)) == 1


def test_the_plugin_of_vllm_does_nothing_in_other_programs():
    module, function = _plugin()
    code = f"import sys; from {module} import {function}; {function}(); print(*sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "LLMDEBUG_LAUNCH"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    loaded = done.stdout.split()
    assert not {"torch", "numpy", "llmdebug_nb.app.launching.child"}.intersection(loaded)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, "its process was killed"),
        ("raise RuntimeError('boom')", 1, "incomplete (RuntimeError)"),
    ],
)
def test_what_was_recorded_until_a_crash_can_be_read(here, end, status, said):
    _write("crash.py", MODEL + f"import os; model(torch.ones(1, 3)); {end}")
    done = _dump("--name", "r", "--", "python", "crash.py")
    assert done.returncode == status
    assert said in done.stderr
    run = ld.open_run("r")
    assert len(run) == 6
    assert not run.info()["complete"]


def _begun(*command, **more):
    """Begin to record a command as ``r``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen([*DUMP, "--name", "r", "--", *command], **pipes, **more)


def test_an_interrupt_ends_the_program_as_it_wants_and_keeps_the_dump(here):
    _write(
        "slow.py",
        MODEL
        + """
import time
model(torch.ones(1, 3))
try:
    print("ran", flush=True)
    for _ in range(600):  # a signal just before a sleep ends none
        time.sleep(0.1)
except KeyboardInterrupt:
    print("stopped", flush=True)
    raise SystemExit(9)
""",
    )
    # a background job's is ignored
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with _begun("python", "slow.py", start_new_session=True, preexec_fn=heeded) as launched:
        assert launched.stdout.readline() == "ran\n"
        launched.send_signal(signal.SIGINT)
        out, said = launched.communicate(timeout=30)
    assert (launched.returncode, out) == (9, "stopped\n")
    assert said.startswith("llmdebug: r: 6 tensors")
    assert ld.open_run("r").info()["complete"]


def test_a_termination_reaches_what_a_script_has_started(here):
    _write(
        "slow.py",
        MODEL
        + "import os, time\nmodel(torch.ones(1, 3))\n"
        + "print(os.getpid(), flush=True)\ntime.sleep(60)",
    )
    with _begun("bash", "-c", "python slow.py; true") as launched:
        pid = int(launched.stdout.readline())
        launched.terminate()
        _, said = launched.communicate(timeout=30)
    assert launched.returncode == 128 + signal.SIGTERM
    assert "can be read" in said
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert len(ld.open_run("r")) == 6


@pytest.mark.parametrize("status", [0, 4])
def test_a_program_that_runs_no_model_says_so_and_keeps_its_status(here, capfd, status):
    line = shlex.join([sys.executable, "-c", f"import sys; sys.exit({status})"])
    assert main(["dump", "--exec", line]) == status
    assert (
        "nothing was recorded: no Python that could be reached imported torch"
        in capfd.readouterr().err
    )
    assert ld.runs() == []


def test_a_filter_that_matches_nothing_says_so_and_leaves_no_run(here):
    _write("call.py", MODEL + "model(torch.ones(1, 3))")
    done = ld.launch("python call.py", name="r", opname="attention")
    assert (done.status, done.path, ld.runs()) == (0, None, [])
    assert any("no module type begins with opname 'attention'" in line for line in done.lines())
    with pytest.raises(ld.errors.UnknownRunError, match="nothing was recorded"):
        _ = done.run


def test_a_users_own_sitecustomize_still_runs(here, monkeypatch):
    (here / "own").mkdir()
    (here / "own" / "sitecustomize.py").write_text(
        "import builtins; builtins.OWN = 'own'", encoding="utf-8"
    )
    monkeypatch.setenv(
        "PYTHONPATH", f"{here / 'own'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    done = ld.launch(
        [sys.executable, "-c", "import sys; sys.exit({'own': 6}[OWN] + ('torch' in sys.modules))"]
    )
    assert done.status == 6


SURVIVOR = """
import json, os, subprocess, sys, time
open("begun", "w").close()
while not os.path.exists("over"):
    time.sleep(0.02)
show = "import json, os; print(json.dumps(dict(os.environ)))"
env = json.loads(subprocess.run(["python3", "-c", show], capture_output=True).stdout)
with open("found.tmp", "w") as file:
    json.dump({"own": dict(os.environ), "late": env}, file)
os.rename("found.tmp", "found")
"""


def test_a_process_that_outlives_the_launcher_finds_nothing_of_ours_that_others_can_write(
    here, monkeypatch
):
    scratch = here / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    _write("survivor.py", SURVIVOR)
    starts = (
        "import os, subprocess, sys\nsubprocess.Popen([sys.executable, 'survivor.py'])\n"
        "while not os.path.exists('begun'): pass"
    )
    ld.launch([sys.executable, "-c", starts], name="r")
    (folder,) = scratch.iterdir()  # it stays, of this user alone, with nothing in it
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir())
    (here / "over").touch()
    deadline = time.monotonic() + 60
    while not (here / "found").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    found = json.loads((here / "found").read_text(encoding="utf-8"))
    assert found["own"]["LLMDEBUG_LAUNCH"] == str(folder)
    assert "LLMDEBUG_LAUNCH" not in found["late"]
    assert str(folder) not in str(found["late"])
    assert "launching" not in found["late"].get("PYTHONPATH", "")


def test_a_launch_without_survivors_leaves_no_folder(here, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    before = sorted(here.iterdir())
    ld.launch([sys.executable, "-c", "pass"], name="r")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("how", ["a link", "others may write", "of another user", "over", "gone"])
def test_a_folder_that_the_launcher_did_not_make_is_no_launch(tmp_path, monkeypatch, how):
    folder = tmp_path / "launch"
    folder.mkdir(mode=0o700)
    handover = Handover(folder)
    handover.write_options({}, ["torch"])
    monkeypatch.setenv("LLMDEBUG_LAUNCH", str(folder))
    assert Handover.here() is not None
    if how == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "others may write":
        folder.chmod(0o770)
    elif how == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    elif how == "over":
        (folder / "options.json").unlink()
    else:
        shutil.rmtree(folder)
    assert Handover.here() is None


# -- the command line -----------------------------------------------------------------------------


def test_a_command_that_is_not_there_is_one_line_and_127(here, capsys):
    assert main(["dump", "--exec", "pyhton x.py"]) == 127
    assert capsys.readouterr().err == "llmdebug: pyhton: command not found\n"
    assert main(["dump", "--exec", "A=1 python x.py"]) == 127
    assert "set variables before llmdebug itself" in capsys.readouterr().err
    _write("text", "")
    assert main(["dump", "--", "./text"]) == 126


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command: say llmdebug dump --exec"),
        (["--exec", "true", "--", "true"], "--exec and -- exclude each other"),
        (["--exec", " "], "expected a command"),
        (["python", "run.py"], "'python' is not an option; a command goes behind --"),
        (["--exec", "python 'a"], "No closing quotation"),
        (["--exec", "python a | tee b"], r"there is no shell to understand '\|'"),
        (["-er", "1,0", "--", "true"], "the pair 1,0 runs backwards"),
        (["-er", "1,2,3", "--", "true"], "expected pairs of first and last"),
        (
            ["-er", "0,0", "--tokens", "3", "--", "true"],
            r"-er \(--range\) and --tokens exclude each other",
        ),
        (
            ["-sd", "--slice", "0", "--", "true"],
            r"--slice and -sd \(--save-desc\) exclude each other",
        ),
        (["--type", "stats", "--reduce", "minmax", "--", "true"], "--reduce and --type stats"),
        (["-o", "/dev/null/x", "--", "true"], "can't write the dump to .*: /dev/null is no folder"),
        (["-time", "0", "-stp", "1", "--", "true"], "time=0 and part='out' exclude each other"),
        (["-ids", "a_b", "--", "true"], "ids 'a_b': expected execution ids"),
        (["-tiling", "--", "true"], "-tiling is of fused kernels: add --graph fused"),
        (["-config", "nowhere.json", "--", "true"], "control file nowhere.json: .*No such file"),
        (["-device", "?", "--", "true"], "device '\\?': expected a device such as cpu"),
        (["--graph", "fx", "--mode", "aten", "--", "true"], "graph='fx' says what is recorded"),
        (
            ["--slice", "0", "--reduce", "minmax", "--", "true"],
            "slice and reduce exclude each other",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(capsys, arguments, message):
    assert main(["dump", *arguments]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(message, said)


def test_less_than_two_gigabytes_of_room_are_refused_by_figures(monkeypatch, capsys):
    usage = type("Usage", (), {"free": 1_500_000_000, "total": 10**12})
    monkeypatch.setattr(program.shutil, "disk_usage", lambda _: usage)
    assert main(["dump", "--", "true"]) == 3
    assert "1.5 GB are free" in capsys.readouterr().err
    assert main(["dump", "-sd", "--", "true"]) == 0
    assert main(["dump", "--max-bytes", "1GB", "--", "true"]) == 0


def test_the_short_names_of_msit_mean_what_they_mean_there():
    parser = argparse.ArgumentParser()
    arguments.declare(parser)
    line = (
        "--exec x -er 1,3,5,7 -time 2 -stp 1 -opname linear -device 3 -ids 2,3_1 -child "
        "false -seed -sd -o d -l debug -config c.json -symlink"
    )
    args = parser.parse_args(line.split())
    given = arguments.options(vars(args))
    assert given.pop("files") == []
    options = DumpOptions.of(**given)
    assert str(options.rounds) == "1,3,5,7"
    assert (options.time, options.part) == (2, "out")
    assert (options.opname, options.device) == (("linear",), "3")
    assert (options.ids, options.children) == (("2", "3_1"), False)
    assert (options.seed, options.stats_only) == (2024, True)
    assert (options.path, options.control) == ("d", "c.json")
    usual = arguments.options(vars(parser.parse_args(["--exec", "x"])))
    assert usual == {"rounds": "0,0", "files": []}
    stats = arguments.options(vars(parser.parse_args(["--type", "model", "tensor", "stats"])))
    assert (stats["files"], stats["stats_only"]) == (["model"], True)
    files = arguments.options(
        vars(parser.parse_args(["--type", "onnx", "kernel", "--graph", "fused", "-tiling"]))
    )
    assert (files["files"], files["stats_only"]) == (["onnx", "kernel", "tiling"], True)


def test_the_long_names_of_msit_and_ids_behind_a_blank_mean_the_same_as_the_short_ones():
    parser = argparse.ArgumentParser()
    arguments.declare(parser)

    def options(line: str):
        given = arguments.options(vars(parser.parse_args(line.split())))
        return given.pop("files"), DumpOptions.of(**given)

    short = "-sd -ids 2,3_1 -er 1,3 -child False -time 0 -opname a -stp 0 -device 3 -config c.json"
    long = (
        "--only-save-desc --save-operation-ids 2, 3_1 --execute-range 1,3 --save-operation-child"
        " False --save-time 0 --operation-name a --save-tensor-part 0 --device-id 3 --config-path"
        " c.json --enable-symlink"
    )
    assert options(long) == options(short)
    assert options("-ids 2, 3_1, 4")[1].ids == ("2", "3_1", "4")
    assert options("--save-tiling --graph fused")[0] == ["tiling"]
    with pytest.raises(ld.errors.OptionError, match="'3_1' is not an option"):
        options("-ids 2 3_1")


@pytest.mark.parametrize("level", ["fatal", "critical"])
def test_the_quietest_levels_of_msit_show_no_messages(level):
    launched = program.Launched(1, messages=[("error", "it failed"), ("info", "so it goes")])
    assert launched.lines(level) == []


def test_a_seed_makes_a_launched_program_deterministic(here):
    Path("run.py").write_text(
        "import os, torch\n"
        "print(torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),"
        " os.environ['PYTHONHASHSEED'], os.environ['LCCL_DETERMINISTIC'])\n"
    )
    done = _dump("-seed", "7", "--", sys.executable, "run.py")
    assert done.stdout.splitlines()[0] == "True 7 7 1"


def test_options_reach_the_program_as_they_were_given():
    given = {"name": "n", "tokens": "0,2-", "types": ["Linear"], "seed": 7, "warmup": 2,
        "apis": ["mm"], "mode": "aten", "opname": "mm"}  # fmt: skip
    options = DumpOptions.of(**given)
    again = DumpOptions.of(**json.loads(json.dumps(options.given())))
    assert again == options


def test_processes_of_one_rank_count_on_also_behind_warm_ups_and_keep_what_only_one_of_them_has(
    tmp_path, monkeypatch
):
    handover = Handover(tmp_path / "handover")
    handover.folder.mkdir()
    for pid, rows, model in (
        (3, 1, nn.Sequential(nn.Linear(2, 2))),
        (1, 2, nn.Sequential(nn.ReLU(), nn.Linear(2, 2))),
    ):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        with SharedRecording(
            None, DumpOptions(name="r", warmup=1, path=tmp_path / "runs"), handover, None
        ):
            for _ in range(3):
                model(torch.ones(rows, 2))
    run = ld.open_run(tmp_path / "runs" / "r")
    assert [p["pid"] for p in run.source.processes] == [3, 1]  # as they began
    of_first, of_second = [(-1, 0), (0, 0), (0, 1)], [(1, 0), (2, 0), (2, 1)]
    inputs = [*((*call, 1) for call in of_first), *((*call, 2) for call in of_second)]
    assert _inputs(run) == [(0, *each) for each in inputs]
    assert [(c.generation, c.step, c.kind) for c in run.steps()][3] == (1, 0, "warmup")
    assert [node.path for node in run.nodes] == ["", "0", "1"]
    assert run.nodes[2].parent == 0
    assert set(run.scalars().generation) == {-1, 1}  # attributes, when each first ran


# -- looking at processes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("python -I x.py", "-I"),
        ("/usr/bin/python3.12 -uE -m x", "-E"),
        ("python -S", "-S"),
        ("python -u x.py -I", None),
        ("python -c -I", None),
        ("python -X dev x.py", None),
        ("bash -E", None),
    ],
)
def test_flags_that_keep_the_hook_out_are_told_from_the_programs_own(words, found):
    why = children.why_unreached(words.split(), pth=False)
    assert (why or "None").startswith(f"it was started with {found}" if found else "None")


def test_interpreters_are_known_by_name():
    assert all(map(is_python, ["python", "/a/python3", "python3.14t"]))
    assert not any(map(is_python, ["bash", "pythonx", "ipython"]))


def test_a_run_that_is_damaged_between_processes_is_still_refused(here):
    folder = create_run(here, "r", {})
    (folder / "rank0_1").mkdir()
    (folder / "rank0_1" / "index.sqlite").write_bytes(b"no index")
    with pytest.raises(ld.errors.CorruptDumpError):
        _ = ld.open_run(folder).source
