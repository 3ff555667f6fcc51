"""Recording options are declared once, and every front end knows the same ones."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import fields

import pytest
from IPython.core.magic_arguments import construct_parser

import llmdebug_nb as ld
from llmdebug_nb.app.launching import arguments
from llmdebug_nb.app.option_flags import given_options
from llmdebug_nb.core.options import DumpKeywords, DumpOptions
from llmdebug_nb.notebook.dump_magic import DumpMagics

PYTHON_ONLY = {"compiler_config"}


def _command_line():
    parser = argparse.ArgumentParser()
    arguments.declare(parser)
    return parser


def _flags(parser):
    return {a.dest: set(a.option_strings) for a in parser._actions if a.dest not in ("help", "h")}


def test_the_types_that_editors_see_are_of_exactly_the_options():
    assert [*DumpKeywords.__annotations__] == [each.name for each in fields(DumpOptions)]


def test_command_line_and_magic_have_the_same_flags_one_for_every_option_that_a_text_can_be():
    command_line, magic = _flags(_command_line()), _flags(construct_parser(DumpMagics.llmdump))
    assert (command_line.pop("words"), magic.pop("model")) == (set(), set())
    assert command_line == magic
    of_options = {name: magic[name] for name in magic if name in DumpOptions.names()}
    assert of_options.keys() == set(DumpOptions.names()) - PYTHON_ONLY
    assert all(f"--{name.replace('_', '-')}" in flags for name, flags in of_options.items())


@pytest.mark.parametrize(
    "function", [ld.dump, ld.launch, ld.step, ld.fx_backend, ld.inductor_backend]
)
def test_signatures_name_every_option_so_that_notebooks_complete_them(function):
    parameters = inspect.signature(function).parameters
    assert set(DumpOptions.names()) <= parameters.keys()
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def test_signatures_show_plain_types():
    shown = str(inspect.signature(ld.dump))
    assert shown.startswith("(model: Models | None = None, *, name: str = 'run', path: str | ")
    assert "tokens: int | str | Iterable[int | str] | TokenSet | None = '0-3'" in shown
    assert shown.endswith(") -> Recording")


@pytest.mark.parametrize("name", ["weights", "logits", "stats_only", "sources", "force_eager"])
def test_a_switch_is_true_or_false(name):
    with pytest.raises(ld.errors.OptionError, match=f"{name} 'no': expected True or False"):
        DumpOptions.of(**{name: "no"})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tokens": []}, r"tokens \[\]: '' is neither a number nor a range"),
        ({"tokens": "x-y"}, "'x-y' is neither a number nor a range; write 0-3"),
        ({"ids": -1}, "'-1': expected execution ids such as 2, 3_1"),
    ],
)
def test_a_value_that_makes_no_sense_is_shown_with_one_that_does(given, says):
    with pytest.raises(ld.errors.OptionError, match=says):
        DumpOptions.of(**given)


def test_the_defaults_in_a_signature_are_the_ones_that_apply():
    assert inspect.signature(ld.dump).parameters["tokens"].default == "0-3"
    assert inspect.signature(ld.step).parameters["tokens"].default == "all"
    assert inspect.signature(ld.fx_backend).parameters["graph"].default == "fx"


def test_help_describes_every_option():
    text = DumpOptions.__doc__
    assert all(f" {name}: " in text for name in DumpOptions.names())
    assert max(map(len, text.splitlines())) <= 100


def test_flags_that_are_not_used_leave_the_defaults_alone():
    parsed = vars(_command_line().parse_args(["--name", "x", "--stats-only"]))
    assert given_options(parsed) == {"name": "x", "stats_only": True}
    assert DumpOptions.of(**given_options(parsed)) == DumpOptions(name="x", stats_only=True)


def test_options_written_as_json_are_read_back_as_they_were():
    options = DumpOptions.of(
        mode="aten+module", types=[dict, "Linear"], ids="2,3_1", profile="op", max_bytes="2kB"
    )
    stored = json.loads(json.dumps(options.as_json()))
    assert stored["mode"] == "module+aten"
    assert (stored["types"], stored["ids"], stored["max_bytes"]) == (
        ["dict", "Linear"],
        ["2", "3_1"],
        2000,
    )
    assert "path" not in stored
    assert DumpOptions.of(**stored).as_json() == options.as_json()
