"""``llmdebug build``: what is compiled against the installed PyTorch."""

from __future__ import annotations

import argparse

from llmdebug_nb.cli.command import OK, Commands, add_command, say


def add(commands: Commands) -> None:
    """Declare the command."""
    add_command(
        commands, "build", _run, "compile what records operators faster, for this PyTorch",
        "Compile the observer of operators against the installed PyTorch, once; it takes half a"
        " minute and a C++ compiler (CXX names another one). With it, statistics of operators"
        " (level aten) with gradients off need no dispatch mode: they cost less to record, and"
        " PyTorch takes its usual way. The rows are the same but for a few.",
    )  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    import torch

    from llmdebug_nb.capture.tape import torch_observer
    from llmdebug_nb.core.places import shown

    say(f"compiling the observer of operators for torch {torch.__version__}…")
    say(f"written: {shown(str(torch_observer.build()))}")
    return OK
