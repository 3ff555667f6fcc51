"""Error checks of whole programs, from the command line and in a real IPython shell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.cli import main

MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half()
ones = torch.ones(2, 8, dtype=torch.float16)
"""
OVERFLOWS = "with torch.no_grad(): model[2].weight.fill_(6e4)\n"


def check(folder: Path, program: str, *flags: str) -> tuple[int, dict[str, object]]:
    """Run a program under ``llmdebug errcheck``; return exit status and result file."""
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    status = main(["errcheck", "-o", str(folder), *flags, "--", sys.executable, str(file)])
    (result,) = folder.glob("errcheck_*.json")
    return status, json.loads(result.read_text(encoding="utf-8"))


def test_a_clean_program_is_clean_and_has_a_result_file(tmp_path, capfd):
    status, result = check(tmp_path, f"{MODEL}print(model(ones).shape)")
    assert (status, result["verdict"], result["rank_0"]) == (0, "clean", [])
    assert "torch.Size([2, 4])" in capfd.readouterr().out


def test_a_program_that_overflows_is_named_and_goes_on(tmp_path, capfd):
    status, result = check(tmp_path, f"{MODEL}{OVERFLOWS}model(ones * 100)\nprint('went on')")
    assert (status, result["verdict"]) == (1, "error")
    first = result["rank_0"][0]
    assert (first["op_name"], first["path"]) == ("Aten.addmm.0.forward", "2/Aten.addmm")
    assert first["level"] == "CRITICAL"
    out = capfd.readouterr().out
    assert "went on" in out
    assert "CRITICAL overflow: 2/Aten.addmm" in out


def test_exit_stops_the_program_and_dumps_the_inputs(tmp_path, capfd):
    program = f"{MODEL}{OVERFLOWS}model(ones * 100)\nprint('went on')"
    status, _ = check(tmp_path, program, "--exit", "--type", "overflow", "nan")
    assert status == 1
    out = capfd.readouterr().out
    assert "went on" not in out
    assert "tensors of the first bad call: " in out
    assert "elements of output 0, in float16" in out
    inputs = [each for each in ld.open_run(tmp_path / "errcheck").records()
              if each.site.role == "input"]  # fmt: skip
    assert len(inputs) == 3


@pytest.mark.parametrize(("program", "status", "verdict"), [
    ("print('no torch')", 2, "nothing checked"),
    ("import torch; torch.ones(2) / 0", 2, "nothing checked"),
    (f"{MODEL}model(ones); raise SystemExit(7)", 4, "clean"),
    (f"{MODEL}import os; model(ones); os._exit(0)", 2, "nothing checked"),
], ids=["no torch", "no model", "a failing program", "a killed process"])  # fmt: skip
def test_a_program_without_a_result_is_told_so(tmp_path, program, status, verdict):
    got, result = check(tmp_path, program)
    assert (got, result["verdict"]) == (status, verdict)
    assert result["notes"] or verdict == "clean"


@pytest.mark.parametrize("words", [[], ["--exec", ""], ["--exec", "a", "--", "b"],
                                   ["--type", "owerflow", "--", "b"]])  # fmt: skip
def test_a_line_that_makes_no_sense_is_refused(words, tmp_path, capsys):
    try:
        status = main(["errcheck", "-o", str(tmp_path), *words])
    except SystemExit as end:
        status = end.code
    assert status == 3
    assert capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_that_does_not_exist_is_told_so(tmp_path, capsys):
    assert main(["errcheck", "-o", str(tmp_path), "--exec", "no-such-command"]) == 4
    assert "no-such-command: command not found" in capsys.readouterr().out


def test_ranks_are_told_apart(tmp_path):
    program = f"""
import os, subprocess, sys
if "RANK" not in os.environ:
    for rank in "01":
        subprocess.run([sys.executable, __file__], env={{**os.environ, "RANK": rank}}, check=True)
    raise SystemExit
{MODEL}
if os.environ["RANK"] == "1":
    {OVERFLOWS}model(ones * 100)
"""
    status, result = check(tmp_path, program)
    assert status == 1
    assert result["rank_0"] == []
    assert result["rank_1"][0]["path"] == "2/Aten.addmm"


# -- in a notebook ------------------------------------------------------------------------------


@pytest.fixture
def shell(ipython, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 4).half()
    with torch.no_grad():
        model.weight.fill_(6e4)
    ipython.user_ns.update(model=model, torch=torch)
    return ipython


def test_the_magic_checks_a_cell_and_keeps_its_result(shell, capsys):
    cell = (
        "%%llmerrcheck model --type overflow nan\ny = model(torch.ones(1, 4).half() * 10)\ny.shape"
    )
    result = shell.run_cell(cell)
    assert (result.success, result.result) == (True, torch.Size([1, 4]))
    assert "CRITICAL overflow" in capsys.readouterr().out
    assert shell.user_ns["errcheck"].result.verdict == "error"
    assert not model_hooks(shell.user_ns["model"])


def test_the_magic_ends_the_cell_at_the_error_if_asked(shell, capsys):
    shell.user_ns["after"] = []
    cell = "%%llmerrcheck --exit -o here\nmodel(torch.ones(1, 4).half() * 10)\nafter.append(1)"
    assert shell.run_cell(cell).success
    assert shell.user_ns["after"] == []
    assert shell.user_ns["errcheck"].dumped.name == "errcheck"
    assert list(Path("here").glob("errcheck_*.json"))


def test_an_error_of_the_cell_is_its_own(shell, capsys):
    result = shell.run_cell("%%llmerrcheck\nmodel(torch.ones(1, 5).half())")
    assert isinstance(result.error_in_exec, RuntimeError)
    assert shell.user_ns["errcheck"].result.processes[0].ended_by == "RuntimeError"


@pytest.mark.parametrize("line", ["%llmerrcheck", "%%llmerrcheck --typo\n1",
                                  "%%llmerrcheck nomodel\n1"])  # fmt: skip
def test_a_wrong_line_is_one_line_of_error(shell, capsys, line):
    shell.run_cell(line)
    out, err = capsys.readouterr()
    assert "UsageError" in out + err
    assert "Traceback" not in out + err


def model_hooks(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)
