"""The requests of an engine that a recording selects: by their number, or by their id."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.option_parsing import TokenSet

# eight digits or more are an id: an engine adds a hyphen and eight hexadecimal digits to each
_NUMBERS = r"\d{1,7}(-(\d{1,7})?)?"
_ADDED = r"-[0-9a-f]{8}$"


@dataclass(frozen=True, slots=True)
class RequestSet:
    """A set of requests. ``wanted``: numbers, ranges of them, and globs over ids, as text."""

    wanted: tuple[str, ...]

    @classmethod
    def parse(cls, spec: object, option: str = "requests") -> RequestSet:
        """Read ``0``, ``"0-3"``, ``"2,chat-7"``, ``"chat-*"``, or a sequence of these.

        Numbers count the requests of a recording from 0, in the order in which they begin.

        Raises:
            OptionError: anything else, an empty set, or a range that runs backwards.
        """
        given = list(spec) if isinstance(spec, Iterable) and not isinstance(spec, str) else [spec]
        parts = [part.strip() for each in given for part in str(each).split(",")]
        right = all(isinstance(each, (str, int)) and not isinstance(each, bool) for each in given)
        if isinstance(spec, cls):
            return spec
        if not right or not parts or not all(parts):
            raise OptionError(
                f"{option} {spec!r}: expected numbers (0,2-3), ids or globs over ids (chat-*)"
            )
        for part in parts:
            if re.fullmatch(_NUMBERS, part):
                TokenSet.parse(part, option)
        return cls(tuple(parts))

    def matching(self, number: int, request: str) -> list[str]:
        """Return the parts that select a request. ``request``: its id.

        The part of an id that an engine adds need not be given.
        """
        names = {request, re.sub(_ADDED, "", request)}
        return [
            part
            for part in self.wanted
            if (
                number in TokenSet.parse(part)
                if re.fullmatch(_NUMBERS, part)
                else any(fnmatchcase(name, part) for name in names)
            )
        ]

    def __str__(self) -> str:
        return ",".join(self.wanted)
