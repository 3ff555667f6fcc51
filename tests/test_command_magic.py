"""`%llmdebug`: the command line in a notebook's kernel."""

from __future__ import annotations

import argparse

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError

import llmdebug_nb as ld
from llmdebug_nb.cli import command_parser
from llmdebug_nb.notebook.command_magic import parsers
from llmdebug_nb.notebook.magics import MAGICS
from models import llama, prompt

OF_TERMINALS = {"-h", "--help"}


@pytest.fixture
def shell(ipython):
    model = llama()
    with ld.dump(model, name="golden", profile="op+kernel+host") as golden:
        model(prompt())
    ipython.user_ns.update(golden=golden, model=model)
    return ipython


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for each in parser._actions for flag in each.option_strings} - OF_TERMINALS


def test_every_command_of_the_command_line_is_there():
    commands = next(
        each.choices
        for each in command_parser(argparse.ArgumentParser)._actions
        if each.choices is not None
    )
    assert list(parsers()) == list(commands)


def test_a_command_that_has_a_magic_has_no_flag_that_its_magic_lacks(shell):
    both = [name for name in parsers() if f"llm{name}" in MAGICS]
    assert both == ["dump", "errcheck", "opcheck", "logits", "doctor", "compare", "lockstep"]
    magics = shell.magics_manager.magics["line"]
    for name in both:
        assert _flags(parsers()[name]) <= _flags(magics[f"llm{name}"].parser), name


def test_a_topology_is_the_same_tree_and_an_object(shell, capsys):
    tree = shell.run_line_magic("llmdebug", "topology golden")
    assert str(tree) == str(ld.topology("golden"))
    assert tree.to_json()["modelName"]
    assert capsys.readouterr().out == ""  # the cell shows its value


def test_tables_are_written_and_their_rows_shown(shell, tmp_path):
    written = shell.run_line_magic("llmdebug", f"tables golden -o {tmp_path}")
    frames = written.frames()
    assert {name.split("/")[1] for name in frames} == {
        "operation_tensors_0", "kernel_tensors_0", "operation_statistic_0",
    }  # fmt: skip
    ops = next(frame for name, frame in frames.items() if "operation_tensors" in name)
    assert len(ops) == len(shell.user_ns["golden"].ops())
    data, _ = shell.display_formatter.format(written)
    assert "OpName" in data["text/html"]
    assert data["text/plain"].startswith(f"written: {tmp_path}")


def test_a_timeline_is_an_object_and_what_was_written_is_said(shell, capsys, tmp_path):
    step = shell.run_line_magic("llmdebug", f"timeline golden -o {tmp_path / 't.svg'}")
    assert type(step).__name__ == "Timeline"
    assert f"written: {tmp_path / 't.svg'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("onnx golden -o {}/golden.onnx", "golden.onnx"),
        ("export golden -o {}/golden.html", "golden.html"),
        ("export golden -o {}/for_msprobe --layout msprobe", "for_msprobe"),
        ("report golden -o {}/page.html", "page.html"),
        ("redact golden -o {}/shared", "shared"),
    ],
)
def test_files_are_written_and_a_line_says_where(shell, capsys, tmp_path, line, file):
    assert shell.run_line_magic("llmdebug", line.format(tmp_path)) is None
    assert (tmp_path / file).exists()
    assert file in capsys.readouterr().out


def test_a_run_is_found_by_the_variable_that_holds_it(shell):
    shell.user_ns["other"] = shell.user_ns["golden"]
    found = shell.run_line_magic("llmdebug", "topology other")
    assert str(found) == str(ld.topology("golden"))


def test_a_command_with_a_magic_is_that_magic(shell, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # msit's line writes its table here
    report = shell.run_line_magic("llmdebug", "compare golden golden")
    assert shell.user_ns["report"] is report
    assert report.verdict == "match"
    again = shell.run_line_magic("llmdebug", "msit llm compare -gp golden -mp golden -l error")
    assert again.verdict == "match"
    assert "llmdebug: runs: llmdebug compare" in capsys.readouterr().err


def test_privacy_and_contents_are_printed(shell, capsys):
    shell.run_line_magic("llmdebug", "info golden --privacy")
    shell.run_line_magic("llmdebug", "info golden")
    out = capsys.readouterr().out
    assert "statistics" in out
    assert "model.embed_tokens" in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "%llmdebug: expected a command; known: dump, "),
        ("topolgy golden", "%llmdebug topolgy: expected a command; nearest: topology"),
        ("topology nosuch", "no run 'nosuch'"),
        ("topology golden --stpe 1", "%llmdebug topology: .*nearest: --step"),
        ("topology golden --step x", "invalid int value: 'x'; see %llmdebug topology --help"),
        ("topology 'golden", "No closing quotation"),
        ("export golden", "required: -o/--output"),
        ("convert golden -o out", "is not of compiled code: record it with graph="),
        ("opcheck", "name one run, as in %llmopcheck golden"),
    ],
)
def test_wrong_lines_are_told_in_one_line(shell, line, says):
    with pytest.raises(UsageError, match=says) as refused:
        shell.run_line_magic("llmdebug", line)
    assert "\n" not in str(refused.value)


def test_help_and_version_are_printed_and_end_nothing(shell, capsys):
    for line, says in (
        ("topology --help", "--step N"),
        ("--help", "timeline"),
        ("--version", torch.__version__),
    ):
        assert shell.run_line_magic("llmdebug", line) is None
        assert says in capsys.readouterr().out
    shell.run_line_magic("pinfo", "%llmdebug")
    text = capsys.readouterr().out
    assert "print the call tree of a dump" in text
    assert "%llmdebug topology golden" in text


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("%llmdebug to", ["topology"]),
        ("%llmdebug topology gol", ["golden"]),
        ("%llmdebug topology golden --", ["--json", "--output", "--step"]),
        ("%llmdebug export golden --layout ms", ["msit", "msprobe"]),
        ("%llmdebug compare golden gol", ["golden"]),
        ("%llmdebug dump o", ["off", "on"]),
    ],
)
def test_tab_completes_commands_runs_and_options(shell, line, offers):
    with provisionalcompleter():
        got = [each.text for each in shell.Completer.completions(line, len(line))]
    assert got[: len(offers)] == offers


def test_results_are_heard_only_while_the_magic_runs(shell, capsys):
    from llmdebug_nb.cli import main

    shell.run_line_magic("llmdebug", "topology golden")
    assert main(["topology", "golden"]) == 0
    assert "model.embed_tokens" in capsys.readouterr().out
