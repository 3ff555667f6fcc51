"""The text of a step's token ids, if they were recorded and there is a tokenizer."""

from __future__ import annotations

from typing import Protocol

from llmdebug_nb.core.errors import LLMDebugError, OptionError
from llmdebug_nb.store.run import Run

_MOST = 64  # the last tokens of a long prompt

Texts = dict[tuple[int, int], str]  # generation and step -> text


class Tokenizer(Protocol):
    def decode(self, ids: list[int]) -> object: ...


def checked(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Return a tokenizer. Raises OptionError unless it can decode."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        kind = type(tokenizer).__name__
        raise OptionError(f"tokenizer: expected one with a method decode(ids), got {kind}")
    return tokenizer


def texts(run: Run, tokenizer: Tokenizer | None) -> Texts:
    """Return the text of the first sequence in the input of each step; of a long prompt its end.

    Without a tokenizer, or recorded ids, there is none.

    Raises:
        OptionError: the tokenizer can't decode the recorded ids.
    """
    tokenizer = checked(tokenizer)
    if tokenizer is None:
        return {}
    result: Texts = {}
    for (generation, step), number in run.index.token_ids().items():
        try:
            ids = run.load(run.record(number))
        except LLMDebugError:  # the explorer reports damaged values when they are shown
            continue
        sequence = ids.reshape(-1, ids.shape[-1])[0] if ids.ndim and ids.numel() else ids.flatten()
        try:
            text = str(tokenizer.decode(sequence[-_MOST:].tolist()))
        except Exception as error:
            raise OptionError(
                f"tokenizer: {type(tokenizer).__name__} can't decode the ids of step {step} "
                f"({type(error).__name__}: {error})"
            ) from None
        result[generation, step] = ("…" if len(sequence) > _MOST else "") + text
    return result
