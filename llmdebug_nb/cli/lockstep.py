"""``llmdebug lockstep``: run two models side by side, and compare them without dumps."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.lockstep import arguments
from llmdebug_nb.cli.command import OK, Commands, say
from llmdebug_nb.cli.compare import told
from llmdebug_nb.core.errors import OptionError, first_line
from llmdebug_nb.core.user_code import FILE, UserCode

if TYPE_CHECKING:
    import torch

_DESCRIPTION = (
    "Run two models side by side, and compare each call as soon as both have made it. The report is"
    " that of compare on two dumps, without the dumps. A model is named as FILE.py:NAME or"
    " package.module:NAME: a torch.nn.Module, or a function that returns one; NAME is model unless"
    " given."
)
_EXAMPLES = """\
examples:
  llmdebug lockstep golden.py mine.py --inputs golden.py:inputs
  llmdebug lockstep path/of/checkpoint port.py:build --inputs '{"input_ids": [[1, 2, 3]]}' --graft
  llmdebug lockstep mine.py --inputs mine.py:inputs --listen tcp://127.0.0.1:5005
  llmdebug lockstep golden.py --inputs golden.py:inputs --connect tcp://127.0.0.1:5005
Exit status: as of compare. That of --listen is 0 after a comparison.
"""
_MODEL = "FILE.py:NAME, module:NAME, or the folder of a checkpoint of transformers"
_INPUTS = (
    "FILE.py:NAME or module:NAME: a tensor, a tuple or dict of arguments, or a function that is"
    " given a model and runs it; or JSON, as text or in a file: lists of numbers become tensors"
)
_JSON = ".json"


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "lockstep", allow_abbrev=False, help="compare two models side by side, without dumps",
        description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="llmdebug lockstep [options] (GOLDEN MINE | GOLDEN --connect ADDRESS"
        " | MODEL --listen ADDRESS)",
    )  # fmt: skip
    arguments.declare(parser, _MODEL, _INPUTS)
    parser.set_defaults(run=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compare, print the report, and return the exit status."""
    given = {k: v for k, v in vars(args).items() if k not in ("run", "command")}
    code = _Code()
    if args.listen is not None:
        from llmdebug_nb.app.lockstep.peer import lockstep_peer

        model = code.model(arguments.offered(given, parser), "model")
        connection = arguments.connection(given)
        lockstep_peer(model, args.listen, code.inputs(args.inputs), ready=_ready, **connection)
        return OK
    from llmdebug_nb.app.lockstep.lockstep import lockstep

    golden, mine = arguments.sides(given)
    report = lockstep(
        code.side(golden, "golden"), code.side(mine, "mine"), code.inputs(args.inputs),
        mapping=args.map, limits=args.limits, calibrate=args.calibrate, metrics=args.metric,
        **arguments.options(given),
    )  # fmt: skip
    return told(report, args)


def _ready(line: str) -> None:
    """Say where a model is offered, at once: whoever waits for the address reads it in a pipe."""
    say(line)
    sys.stdout.flush()


class _Code:
    """Finds what the command line names. Each file is run once."""

    def __init__(self) -> None:
        self._code = UserCode()

    def side(self, place: str, name: str) -> torch.nn.Module | str:
        """Return a model, or the address of another process. Raises OptionError."""
        return place if arguments.is_address(place) else self.model(place, name)

    def model(self, place: str, name: str) -> torch.nn.Module:
        """``name``: the side, for messages. Raises OptionError."""
        import torch

        if Path(place).is_dir():
            from llmdebug_nb.app.logits.arguments import model

            return model(place)
        found = self._get(place, name, "model")
        if not isinstance(found, torch.nn.Module) and callable(found):
            try:
                found = found()
            except Exception as error:  # the user's code may raise anything
                why = f"{type(error).__name__}: {first_line(error)}"
                raise OptionError(f"{name}: {place} fails: {why}") from None
        if not isinstance(found, torch.nn.Module):
            kind = type(found).__name__
            raise OptionError(
                f"{name}: {place} gives a {kind}; expected a torch.nn.Module, or a function without"
                " arguments that returns one"
            )
        return found

    def inputs(self, place: str | None) -> Any:
        """Return what `lockstep` takes as inputs. Raises OptionError."""
        if place is None:
            raise OptionError("inputs: missing; say --inputs FILE.py:NAME, or JSON")
        is_text = place.lstrip()[:1] in ("{", "[")
        if not is_text and not place.endswith(_JSON):
            return self._get(place, "inputs", "inputs")
        try:
            return _tensors(json.loads(place if is_text else Path(place).read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            what = "" if is_text else f" {place}"
            raise OptionError(
                f"inputs{what}: {first_line(error)}; expected JSON such as"
                ' {"input_ids": [[1, 2, 3]]}'
            ) from None

    def _get(self, place: str, option: str, name: str) -> object:
        """``name``: what is meant of a file or a module if the user names nothing in it."""
        where, colon, _ = place.rpartition(":")
        place, where = (place, where) if colon else (f"{place}:{name}", place)
        # as Python does: a file may import what lies beside it, a module what lies here
        folder = str(Path(where).resolve().parent) if where.endswith(FILE) else os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return self._code.get(place, option, f"{name}.py:{name}")


def _tensors(value: object) -> object:
    """Return JSON with tensors in place of its lists of numbers. Raises ValueError, TypeError."""
    import torch

    if isinstance(value, dict):
        return {name: _tensors(each) for name, each in value.items()}
    return torch.tensor(value) if isinstance(value, list) else value
