"""Selects the steps of an engine that compute certain requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.records import RootCall
from llmdebug_nb.core.requests import RequestSet

_SHOWN = 5  # ids in a message


class Part(NamedTuple):
    """A request's part of a step: ``tokens`` positions from ``begins`` on.

    ``prompt``: the length of its prompt, or None if the recording began later than the request.
    """

    request: str
    begins: int
    tokens: int
    prompt: int | None


class RequestFilter:
    """Numbers the requests of engines in one recording, and selects root calls by them.

    Tokens of a request count as in `generate`: 0 is its prompt, then each one that it is fed; those
    of a request that began before the recording, from where that saw it first.
    """

    def __init__(self, wanted: RequestSet | None) -> None:
        self._wanted = wanted
        self._numbers: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._matched: set[str] = set()  # parts of ``wanted``
        # by root call: the ranges of tokens of wanted requests, inclusive
        self._tokens: dict[int, list[tuple[int, int]]] = {}

    @property
    def is_on(self) -> bool:
        return self._wanted is not None

    def computes(self, root_call: int, parts: Iterable[Part]) -> None:
        """Note the requests that a root call of an engine computes, in the engine's order."""
        if self._wanted is None:
            return
        ranges = self._tokens[root_call] = []
        for part in parts:
            number = self._numbers.setdefault(part.request, len(self._numbers))
            usual = part.begins + 1 if part.prompt is None else part.prompt
            prompt = self._prompts.setdefault(part.request, usual)
            matched = self._wanted.matching(number, part.request)
            self._matched.update(matched)
            if matched:
                first = part.begins - prompt + 1
                ranges.append((max(0, first), max(0, first + part.tokens - 1)))

    def selects(self, call: RootCall, tokens: TokenSet) -> bool:
        """Return whether a root call computes one of these tokens of a wanted request."""
        ranges = self._tokens.get(call.index, ())
        return any(n in tokens for first, last in ranges for n in range(first, last + 1))

    def why_none(self, tokens: TokenSet) -> str:
        """Explain why no step was recorded."""
        if not self._numbers:
            return f"requests {self._wanted} are of an engine, and none computed any here"
        if not self._matched:
            return f"requests {self._wanted} never came; {self._seen()}"
        return f"tokens {tokens} of requests {self._wanted} never came"

    def notes(self) -> list[str]:
        """Name what was asked for and did not come."""
        missing = (
            [part for part in self._wanted.wanted if part not in self._matched]
            if (self._wanted is not None)
            else []
        )
        return [f"requests {','.join(missing)} never came; {self._seen()}"] if missing else []

    def _seen(self) -> str:
        count, ids = len(self._numbers), list(self._numbers)[:_SHOWN]
        more = ", …" if count > _SHOWN else ""
        return f"{count} seen, numbered from 0: {', '.join(ids)}{more}" if ids else "none seen"
