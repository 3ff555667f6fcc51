"""Errors name an option as the user wrote it: in the words of the upstream tool."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from llmdebug_nb.core.errors import EmptyDumpError, OptionError

_OPTION = re.compile(r"((?:nothing (?:was recorded|to record): )?)(\w+)\b")


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the option that an error's message begins with. ``names``: our name to upstream's.

    Raises:
        OptionError, EmptyDumpError: those of the block, with upstream's name of the option.
    """
    try:
        yield
    except (OptionError, EmptyDumpError) as error:
        match = _OPTION.match(str(error))
        if match is None or match[2] not in names:
            raise
        message = f"{match[1]}{names[match[2]]}{str(error)[match.end() :]}"
        for ours, theirs in names.items():
            message = message.replace(f" under {ours} ", f" under {theirs} ")
        raise type(error)(message) from None
