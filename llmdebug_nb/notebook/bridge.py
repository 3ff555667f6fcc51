"""Answers the requests of a page by a view, and turns every error into a message."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.show import wire_requests

Answers = dict[str, tuple[type, type]]  # op -> request, answer


class BadRequestError(LLMDebugError):
    """A message that the wire types don't describe."""


class Bridge:
    """Passes requests to ``view``, which has one method per op of ``answers``.

    A method takes the request and returns the answer, or the answer and its binary buffers.
    Recent kernels handle messages in a thread beside the running cell, so requests take turns.
    """

    def __init__(self, view: object, answers: Answers = wire_requests.ANSWERS) -> None:
        self._view = view
        self._answers = answers
        self._lock = threading.Lock()

    def answer(self, content: object) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the message to send back and its buffers; an error is a message too."""
        number = content.get("re") if isinstance(content, dict) else None
        try:
            request = check_request(content, self._answers)
            with self._lock:
                result = getattr(self._view, request["op"])(request)
            answer, buffers = result if isinstance(result, tuple) else (result, [])
            # the kernel would lose a message that JSON can't hold without an error
            msgspec.convert(answer, self._answers[request["op"]][1])
            return {"re": number, **answer}, [memoryview(buffer) for buffer in buffers]
        except LLMDebugError as error:
            return {"re": number, "error": one_line(str(error))}, []
        except Exception as error:
            return {"re": number, "error": one_line(f"{type(error).__name__}: {error}")}, []


def check_request(content: object, answers: Answers = wire_requests.ANSWERS) -> dict[str, Any]:
    """Return the request without its number. Raises BadRequestError."""
    if not isinstance(content, dict):
        raise BadRequestError(f"a message must be an object, not {type(content).__name__}")
    op = content.get("op")
    if not isinstance(op, str) or op not in answers:
        # the repr of nested lists may have no end
        seen = (
            f"{op!r:.60}"
            if isinstance(op, (str, int, type(None)))
            else f"of type {type(op).__name__}"
        )
        raise BadRequestError(f"unknown op {seen}; known: {', '.join(answers)}")
    try:
        request: dict[str, Any] = msgspec.convert(content, answers[op][0])
    except (ValueError, RecursionError) as error:  # also of texts that are no UTF-8
        raise BadRequestError(f"{op}: {error}") from None
    unknown = content.keys() - request.keys() - {"re"}
    if unknown:
        raise BadRequestError(f"{op}: unknown key {', '.join(map(repr, sorted(unknown)))}")
    return request


def one_line(text: str) -> str:
    """Return ``text`` without line breaks."""
    return " ".join(text.split())
