"""What the token ids of a step say, where they were recorded and a tokenizer is at hand. Nothing is computed from the model."""

from __future__ import annotations

from typing import Any

from llmdebug_nb.core.errors import LLMDebugError, OptionError
from llmdebug_nb.core.opened_run import OpenedRun

_MOST = 64  # tokens of a prompt: its last ones
Texts = dict[tuple[int, int], str]  # generation and step -> text


def checked(tokenizer: Any) -> Any:
    """Return a tokenizer. Raises OptionError unless it can decode."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise OptionError(
            f"tokenizer: expected one with a method decode(ids), got {type(tokenizer).__name__}"
        )
    return tokenizer


def texts(run: OpenedRun, tokenizer: Any) -> Texts:
    """Return the text of the first sequence that each step was given; of a long prompt its end. Without ids, or a tokenizer, none.

    Raises OptionError: the tokenizer can't decode what was recorded.
    """
    if checked(tokenizer) is None:
        return {}
    found: Texts = {}
    for (generation, step), number in run.index.token_ids().items():
        try:
            ids = run.load(run.record(number))
        except LLMDebugError:  # a damaged payload shows itself where it is looked at
            continue
        row = (
            ids.reshape(-1, ids.shape[-1])[0].tolist()
            if ids.ndim and ids.numel()
            else ids.reshape(-1).tolist()
        )
        try:
            text = str(tokenizer.decode(row[-_MOST:]))
        except Exception as error:
            raise OptionError(
                f"tokenizer: {type(tokenizer).__name__} can't decode the ids of step {step} ({type(error).__name__}: {error})"
            ) from None
        found[generation, step] = ("…" if len(row) > _MOST else "") + text
    return found
