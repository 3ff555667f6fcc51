"""``llmdebug lockstep`` and ``%llmlockstep``: models from files, two processes, one-line errors."""

from __future__ import annotations

import copy
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.notebook.completion import _completions

GOLDEN = """
import torch
from shared import Net

def model():
    return Net(1.0)

inputs = torch.ones(2, 4)
runs = lambda model: model(torch.ones(1, 4))
"""
SHARED = """
import torch
from dataclasses import dataclass
from torch import nn

@dataclass
class Settings:
    factor: float

class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.settings = Settings(factor)

    def forward(self, x):
        return self.second(self.first(x) * self.settings.factor)
"""
MINE = """
from shared import Net

model = Net(1.5)
same = Net(1.0)

def fails():
    raise ValueError("no weights\\nhere")

def exits():
    raise SystemExit("enough")
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs of a user, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("LLMDEBUG_SECRET", raising=False)
    for name, text in (("golden", GOLDEN), ("shared", SHARED), ("mine", MINE)):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of a program of another test
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    Path("broken.py").write_text("1 / 0", encoding="utf-8")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def lockstep(*words: str) -> int:
    return main(["lockstep", *words])


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["golden.py", "mine.py"], 1),
        (["golden.py:model", "mine.py:same"], 0),
        (["golden:model", "mine:model"], 1),
        (["golden.py", "mine.py", "--stop"], 1),
    ],
)
def test_models_of_files_and_modules_are_compared(words, status, capsys):
    assert lockstep(*words, "--inputs", "golden.py") == status
    said = capsys.readouterr().out
    assert ("second input[0] step 0, error 0.5" in said) == (status == 1)
    assert "in lockstep: at most" in said
    assert ("stopped at the first divergence" in said) == ("--stop" in words)


@pytest.mark.parametrize(
    "inputs",
    ["golden.py:runs", "[[1.0, 1.0, 1.0, 1.0]]", '{"x": [[1.0, 1.0, 1.0, 1.0]]}', "given.json"],
)
def test_inputs_are_tensors_functions_or_json(inputs, capsys):
    Path("given.json").write_text('{"x": [[1.0, 1.0, 1.0, 1.0]]}', encoding="utf-8")
    assert lockstep("golden.py", "mine.py:same", "--inputs", inputs, "-l", "error") == 0
    assert capsys.readouterr().out == "Verdict: match\n"


def test_options_of_recordings_and_of_comparisons_reach_the_report(capsys):
    words = ["golden.py", "mine.py", "--inputs", "golden.py", "--mode", "module+api", "--prove",
             "--window", "1kB", "--csv", "rows.csv"]  # fmt: skip
    assert lockstep(*words) == 1
    said = capsys.readouterr().out
    assert "Tensor.mul" in said
    assert "window 1.0 kB" in said
    assert "With golden's value put in at" in said
    assert "Tensor.mul" in Path("rows.csv").read_text(encoding="utf-8")


def test_limits_and_a_calibration_are_those_of_compare(capsys):
    Path("limits.yaml").write_text("'*': {relative_l2: 10.0}\n", encoding="utf-8")
    words = ["golden.py", "mine.py", "--inputs", "golden.py", "-l", "error"]
    assert lockstep(*words, "--limits", "limits.yaml") == 0
    assert lockstep(*words, "--calibrate", "auto") == 1
    assert capsys.readouterr().out == "Verdict: within_noise\nVerdict: diverged\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("golden.py --inputs golden.py", "expected GOLDEN and MINE, or GOLDEN --connect"),
        ("golden.py mine.py", "inputs: missing"),
        ("golden.py none.py --inputs golden.py", "mine: there is no file none.py"),
        ("golden.py none:x --inputs golden.py", "mine: there is no module or file none"),
        ("golden.py broken.py --inputs golden.py", "broken.py can't be run: ZeroDivisionError"),
        ("golden.py mine.py:fails --inputs golden.py", "fails: ValueError: no weights"),
        ("golden.py mine.py:modle --inputs golden.py", "defines no 'modle'; nearest: model"),
        ("golden.py golden.py:inputs --inputs golden.py", "gives a Tensor; expected a torch.nn"),
        ("golden.py mine.py --inputs none.json", "inputs none.json: .*No such file"),
        ("golden.py mine.py --inputs [[1,]]", "inputs: .*expected JSON such as"),
        ("golden.py mine.py --inputs golden.py --stop --graft", "goes on with nothing"),
        ("golden.py mine.py --inputs golden.py --stop --prove", "prove: not with stop or graft"),
        ("golden.py mine.py --inputs golden.py --graft --calibrate auto", "calibrate: with stop"),
        ("golden.py mine.py --inputs golden.py --window much", "window 'much': expected a number"),
        ("golden.py mine.py --inputs golden.py --name x", "unrecognized arguments: --name x"),
        ("golden.py tcp://localhost:1 --inputs golden.py", "no secret is given"),
        ("golden.py --inputs golden.py --listen tcp://:x", "expected tcp://host:port"),
        ("golden.py --inputs golden.py --listen tcp://localhost:0 --graft", "graft is said where"),
        ("golden.py --inputs golden.py --connect tcp://h:1 --secret-file none", "can't be read"),
        ("golden.py --inputs golden.py --connect tcp://h:1 --secret-file empty", "one secret, got"),
    ],
)  # fmt: skip
def test_bad_input_is_one_readable_line(words, message, capsys):
    Path("empty").write_text("\n", encoding="utf-8")
    try:
        status = lockstep(*words.split())
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 3
    said = capsys.readouterr().err
    line = said.strip().splitlines()[-1]
    assert "Traceback" not in said
    assert re.search(message, line), line


def test_two_processes_meet_with_the_secret_of_a_file_or_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("LLMDEBUG_SECRET", "a secret of tests")
    Path("secret").write_text("a secret of tests\n", encoding="utf-8")
    ended: list[int] = []

    def serve() -> None:
        words = ["mine.py", "--inputs", "golden.py", "--listen", "tcp://127.0.0.1:0"]
        ended.append(lockstep(*words, "--secret-file", "secret"))

    thread = threading.Thread(target=serve)
    thread.start()
    said, until = "", time.monotonic() + 60
    while "tcp://" not in said and time.monotonic() < until:
        time.sleep(0.05)
        said += capsys.readouterr().out
    address = said.split()[0]
    assert "secret" not in said
    assert lockstep("golden.py", "--inputs", "golden.py", "--connect", address, "--graft") == 1
    thread.join(60)
    assert ended == [0]
    assert "mine went on with golden's value after" in capsys.readouterr().out


# -- the notebook ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(4, 4), nn.Linear(4, 2), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.factor)


@pytest.fixture
def shell(ipython: Any) -> Any:
    golden = Scaled(1.0)
    mine = copy.deepcopy(golden)
    mine.factor = 1.5
    ipython.user_ns.update(golden=golden, mine=mine, ids=torch.ones(2, 4), torch=torch)
    return ipython


def test_the_magic_gives_the_report_and_binds_it(shell):
    report = shell.run_line_magic("llmlockstep", "golden mine --inputs ids --mode module+api")
    assert shell.user_ns["report"] is report
    assert report.lockstep.ran == (1, 1)
    assert report.findings[0].path.endswith("Tensor.mul")
    same = shell.run_line_magic("llmdebug", "lockstep golden mine --inputs ids --stop")
    assert same.lockstep.stopped


def test_the_magic_evaluates_expressions_and_takes_variables(shell):
    shell.user_ns["rules"] = {"*": {"relative_l2": 10.0}}
    line = 'golden mine --inputs "lambda model: model(torch.ones(1, 4))" --limits rules'
    rows = shell.run_line_magic("llmlockstep", line).differences
    assert {row.limit for row in rows} == {10.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("golden mine", "--inputs is missing"),
        ("golden --inputs ids", "expected GOLDEN and MINE"),
        ("golden mien --inputs ids", "can't evaluate 'mien'.*nearest: mine"),
        ("golden golden --inputs ids", r"share the module \(root\)"),
        ("golden mine --inputs ids --stpo", "unrecognized arguments: --stpo; nearest: --stop"),
        ("golden --inputs ids --connect tcp://localhost:1", "no secret is given"),
        ("golden --inputs ids --listen tcp://localhost:0 --stop", "stop is said where"),
    ],
)
def test_wrong_lines_are_one_readable_error(shell, line, message):
    with pytest.raises(UsageError, match=message):
        shell.run_line_magic("llmlockstep", line)


def test_models_inputs_and_options_are_completed(shell):
    def offered(line: str) -> set[str]:
        return {text for text, _ in _completions(shell, line)}

    assert {"golden", "mine", "--graft"} <= offered("%llmlockstep ")
    assert "ids" not in offered("%llmlockstep golden ")
    assert "ids" in offered("%llmlockstep golden mine --inputs ")
    assert "auto" in offered("%llmlockstep golden mine --calibrate ")
    assert "module+api" in offered("%llmdebug lockstep golden mine --mode ")


def test_the_help_of_the_magic_tells_its_options(shell):
    help_text = shell.magics_manager.magics["line"]["llmlockstep"].__doc__
    assert all(word in help_text for word in ("--graft", "--secret-file", "--layers", "--prove"))
    assert "--fusion-switch" not in help_text
    assert ld.lockstep.__doc__ is not None
