"""The command line, as a user runs it."""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.cli import _COMMANDS, command_parser, main
from models import llama, prompt


@pytest.fixture
def runs():
    model = llama()
    with ld.dump(model, name="golden"):
        model(prompt())
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    with ld.dump(model, name="mine"):
        model(prompt())


def test_info_as_json_has_the_promised_keys(runs, capsys):
    assert main(["info", "golden", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert {"layout", "records", "steps", "ranks", "processes", "bytes", "complete"} <= set(info)
    assert (info["layout"], info["records"], info["steps"], info["complete"]) == (
        "llmdebug-run",
        78,
        1,
        True,
    )
    assert info["bytes"] == sum(f.stat().st_size for f in Path(info["path"]).rglob("tensors.bin"))


def test_info_for_people_shows_the_first_rows(runs, capsys):
    assert main(["info", "golden"]) == 0
    assert "model.embed_tokens" in capsys.readouterr().out


def test_compare_tells_by_its_exit_status(runs, capsys, tmp_path):
    assert main(["compare", "golden", "golden"]) == 0
    assert "match" in capsys.readouterr().out
    files = tmp_path / "d.csv", tmp_path / "r.html"
    assert main(["compare", "golden", "mine", "-o", str(files[0]), "--html", str(files[1])]) == 1
    out = capsys.readouterr().out
    assert "→ A weight differs in lm_head (Linear)" in out
    assert all(file.exists() for file in files)
    assert main(["compare", "golden", "nosuch"]) == 3
    assert "no run 'nosuch'" in capsys.readouterr().err


def test_report_writes_a_page_that_needs_nothing_else(runs, tmp_path, capsys):
    for arguments in (["golden"], ["golden", "mine"]):
        target = tmp_path / "page.html"
        assert main(["report", *arguments, "-o", str(target)]) == 0
        page = target.read_text(encoding="utf-8")
        assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:)[a-z]+:", page)
        assert "default-src 'none'" in html.unescape(page)
        assert "<script" not in page
    assert (
        page.count("data:image/png;base64,") == 3
    )  # of the layers, of the tensor to blame and of its errors


def test_errors_are_one_line_and_status_3(tmp_path):
    for arguments in (["info", str(tmp_path)], ["compare", "a", "b"], ["report", "a"]):
        done = subprocess.run(
            [sys.executable, "-m", "llmdebug_nb.cli", *arguments],
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 3
        assert done.stderr.startswith("llmdebug: ")
        assert done.stderr.count("\n") == 1


def test_the_command_is_installed_and_shows_its_version():
    done = subprocess.run(
        [Path(sys.executable).parent / "llmdebug", "--version"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.startswith(f"llmdebug {ld.__version__}, ")


def test_the_version_says_whether_the_c_kernel_is_used():
    from llmdebug_nb.core.kernels import native

    command = [sys.executable, "-m", "llmdebug_nb.cli", "--version"]
    with_it = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    without = subprocess.run(
        command,
        check=True,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "LLMDEBUG_NATIVE": "0"},
    ).stdout
    assert with_it.startswith(f"llmdebug {ld.__version__}, torch {torch.__version__}, ")
    assert ("with the C kernel" in with_it) == (native.why_not() is None)
    assert "without the C kernel (LLMDEBUG_NATIVE=0 turns it off)" in without


def test_each_command_is_added_under_its_name_and_without_the_others():
    for name in _COMMANDS:
        parser = command_parser(argparse.ArgumentParser, only=name)
        (commands,) = (each.choices for each in parser._actions if each.choices)
        assert list(commands) == [name]


def test_launching_a_program_imports_nothing_that_compares():
    code = (
        "import sys; from llmdebug_nb.cli import main\n"
        "try: main(['dump', '--', 'no such program'])\n"
        "finally: print([name for name in sys.modules if name in"
        " ('torch', 'llmdebug_nb.comparison.differences', 'llmdebug_nb.app.uploading')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done
