"""The text of a step's token ids, if they were recorded and there is a tokenizer."""

from __future__ import annotations

from typing import Any, Protocol

from llmdebug_nb.core.errors import LLMDebugError, OptionError
from llmdebug_nb.core.opened_run import OpenedRun

<<<<<<< HEAD
_MOST = 64  # tokens of a prompt: its last ones
=======
_MOST = 64  # the last tokens of a long prompt
# the model's argument of that name, or the input of its first embedding
_IDS = """role = 'input' AND phase = 'forward' AND payload IS NOT NULL AND kept IS NULL AND dtype IN ('int64', 'int32')
 AND (slot LIKE '%input_ids' OR op LIKE '%Embedding')"""

>>>>>>> c758717 (HTML is made by templates that escape every name; text and HTML share their tables)
Texts = dict[tuple[int, int], str]  # generation and step -> text


class Tokenizer(Protocol):
    def decode(self, ids: list[int]) -> object: ...


def checked(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Return a tokenizer. Raises OptionError unless it can decode."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise OptionError(
            f"tokenizer: expected one with a method decode(ids), got {type(tokenizer).__name__}"
        )
    return tokenizer


<<<<<<< HEAD
def texts(run: OpenedRun, tokenizer: Any) -> Texts:
    """Return the text of the first sequence that each step was given; of a long prompt its end. Without ids, or a tokenizer, none.
=======
def texts(run: Any, tokenizer: Tokenizer | None) -> Texts:
    """Return the text of the first sequence in the input of each step; of a long prompt its end.
>>>>>>> c758717 (HTML is made by templates that escape every name; text and HTML share their tables)

    Without a tokenizer, or recorded ids, there is none.

    Raises:
        OptionError: the tokenizer can't decode the recorded ids.
    """
    tokenizer = checked(tokenizer)
    if tokenizer is None:
        return {}
    found: Texts = {}
    for (generation, step), number in run.index.token_ids().items():
        try:
            ids = run.load(run.record(number))
        except LLMDebugError:  # the explorer reports damaged values when they are shown
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
