"""What two tokenizers make of the same texts and the same messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.kernels.fingerprint import fingerprint

# one text for each thing that tokenizers differ in: spaces, digits, case, other scripts, code
TEXTS = (
    "Hello, world!", " leading and  double  spaces ", "In 2024, 3.14159 + 1,000 = ?",
    "Zürich, naïve, œuvre", "東京 は 晴れ", "def f(x):\n\treturn x\n\n", "<s> </s> <|endoftext|>",
    "🙂👍🏽", "",
)  # fmt: skip
_MESSAGES = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "padding_side")
_SHOWN = 24  # ids


class Encoder(Protocol):
    def encode(self, text: str) -> Sequence[int]: ...


def facts(tokenizer: Encoder, texts: Sequence[str]) -> dict[str, str]:
    """Return the ids of each text, special tokens, and the chat template with what it makes.

    Raises OptionError: it can't encode a text.
    """
    found = {"class": type(tokenizer).__name__}
    for name in _SPECIAL:
        value = getattr(tokenizer, name, None)
        if value is not None:
            found[name.replace("_", " ")] = str(value)
    for text in texts:
        found[f"ids of {text!r:.40}"] = _ids(tokenizer, text)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        found["chat template"] = f"{fingerprint(template.encode())} ({len(template):,} characters)"
        found["chat template: a conversation"] = _conversation(tokenizer)
    return found


def _ids(tokenizer: Encoder, text: str) -> str:
    try:
        ids = list(tokenizer.encode(text))
    except Exception as error:  # the tokenizer is the program's: it may raise anything
        raise OptionError(
            f"tokenizer: {type(tokenizer).__name__} can't encode {text!r}"
            f" ({type(error).__name__}: {error})"
        ) from None
    more = " …" if len(ids) > _SHOWN else ""
    return f"{', '.join(map(str, ids[:_SHOWN]))}{more} ({len(ids)})"


def _conversation(tokenizer: object) -> str:
    apply = getattr(tokenizer, "apply_chat_template", None)
    try:
        return str(apply(_MESSAGES, tokenize=False, add_generation_prompt=True)) if apply else ""
    except Exception as error:  # a template may refuse a role
        return f"{type(error).__name__}: {error}"
