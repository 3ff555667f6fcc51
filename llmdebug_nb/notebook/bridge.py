"""Takes the page's requests, has them answered by a view, and never fails silently."""

from __future__ import annotations

import json
import threading
import typing
from collections.abc import Iterator
from typing import Any

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.show import wire

Answers = dict[str, tuple[type, type]]  # op -> request, answer


class BadRequestError(LLMDebugError):
    """A message that nothing describes."""


class Bridge:
    """Dispatches requests to ``view``, which has one method per op of ``answers``.

    A method takes the request and returns the answer, or the answer and its binary buffers.
    Recent kernels handle messages in a thread beside the running cell, so requests take turns.
    """

    def __init__(self, view: Any, answers: Answers = wire.ANSWERS) -> None:
        self._view = view
        self._answers = answers
        self._lock = threading.Lock()

    def answer(self, content: object) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the message to send back and its buffers; an error is a message too."""
        re = content.get("re") if isinstance(content, dict) else None
        try:
            request = check_request(content, self._answers)
            with self._lock:
                result = getattr(self._view, request["op"])(request)
            answer, buffers = result if isinstance(result, tuple) else (result, [])
            json.dumps(
                answer, allow_nan=False
            )  # else the message is lost on its way, without a word
            return {"re": re, **answer}, [memoryview(buffer) for buffer in buffers]
        except LLMDebugError as error:
            return {"re": re, "error": one_line(str(error))}, []
        except Exception as error:
            return {"re": re, "error": one_line(f"{type(error).__name__}: {error}")}, []


def check_request(content: object, answers: Answers = wire.ANSWERS) -> dict[str, Any]:
    """Return the request without its number; raise `BadRequestError` unless it is as ``answers`` says."""
    if not isinstance(content, dict):
        raise BadRequestError(f"a message must be an object, not {type(content).__name__}")
    op = content.get("op")
    if not isinstance(op, str) or op not in answers:
        raise BadRequestError(f"unknown op {op!r}; known: {', '.join(answers)}")
    request = {name: value for name, value in content.items() if name != "re"}
    for problem in problems(request, answers[op][0]):
        raise BadRequestError(f"{op}: {problem}")
    return request


def problems(request: dict[str, Any], shape: type) -> Iterator[str]:
    """Yield what is wrong with a request of that `TypedDict`."""
    hints = typing.get_type_hints(shape)
    for name, hint in hints.items():
        if name not in request:
            yield f"{name!r} is missing"
        elif not fits(request[name], hint):
            yield f"{name!r} must be {describe(hint)}, not {request[name]!r:.60}"
    for name in request.keys() - hints.keys():
        yield f"unknown key {name!r}"


def fits(value: object, hint: Any) -> bool:
    """Is ``value`` of that type? Only the types that requests use are known."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    return type(value) is hint  # not isinstance: True is no int here


def describe(hint: Any) -> str:
    """Return a type in words."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def one_line(text: str) -> str:
    """Return ``text`` without line breaks."""
    return " ".join(text.split())
