"""The flags of ``llmdebug logits`` and ``%llmlogits``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmdebug_nb.comparison.token_checks import RULES
from llmdebug_nb.core.errors import MissingPackageError, OptionError
from llmdebug_nb.show.tokens import Tokenizer

if TYPE_CHECKING:
    import torch


class Loaded(Tokenizer, Protocol):
    """A tokenizer of transformers."""

    def encode(self, text: str) -> Sequence[int]: ...


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a comparison of logits."""
    option = parser.add_argument
    option("--rule", metavar="R", default="rounding",
           help=f"what passes: {', '.join(RULES)} (default: rounding), or limits by metric:"
           " kl_divergence=1e-3,cosine=0.999")  # fmt: skip
    option("--top", type=int, metavar="K", default=5, help="the k of top-k (default: 5)")
    option("--clip", type=float, metavar="E",
           help="count importance ratios outside of 1-E to 1+E (default: 0.2)")  # fmt: skip
    option("--at", metavar="PATH[SLOT]", action="append",
           help="the tensor to take; twice: of golden, then of mine")  # fmt: skip
    option("--csv", metavar="F", help="write a table of all tokens")
    option("--html", metavar="F", help="write the result as one HTML page")


def options(args: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of `logits` among the parsed ones. Raises OptionError."""
    return {
        "rule": _rule(str(args["rule"])),
        "top": args["top"],
        "clip": args["clip"],
        "at": _at(args["at"]),
    }


def _rule(text: str) -> str | dict[str, float]:
    """Read a rule: a name, or limits such as ``kl_divergence=1e-3``."""
    if "=" not in text:
        return text
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise OptionError(f"rule {part!r}: expected metric=number") from None
    return limits


def _at(given: object) -> str | tuple[str, str] | None:
    if not isinstance(given, list) or not given:
        return None
    if len(given) > 2:
        raise OptionError(f"at: {len(given)} places; expected one, or golden's and mine's")
    return str(given[0]) if len(given) == 1 else (str(given[0]), str(given[1]))


def tokenizer(where: str | os.PathLike[str]) -> Loaded:
    """Load a tokenizer from a folder, or by a name that is on this machine; nothing is fetched.

    Raises MissingPackageError, OptionError.
    """
    found: Loaded = _loaded("tokenizer", "AutoTokenizer", where)
    return found


def model(where: str | os.PathLike[str]) -> torch.nn.Module:
    """Load a causal language model, likewise, in the dtype of its weights, for evaluation.

    Raises MissingPackageError, OptionError.
    """
    found: torch.nn.Module = _loaded("model", "AutoModelForCausalLM", where, dtype="auto")
    return found.eval()


def _loaded(what: str, kind: str, where: str | os.PathLike[str], **options: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingPackageError(
            f"a {what} needs transformers, which is not installed: pip install transformers"
        ) from None
    try:
        return getattr(transformers, kind).from_pretrained(
            where, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # transformers raises many kinds
        line = str(error).strip().partition("\n")[0]
        raise OptionError(f"{what} {os.fspath(where)!r} can't be loaded: {line}") from None
