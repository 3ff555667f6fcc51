"""The result of a comparison of logits as HTML: the strip of tokens, the picture, the tables."""

from __future__ import annotations

from markupsafe import Markup

from llmdebug_nb.comparison.token_checks import LogitsResult, TokenCheck
from llmdebug_nb.core.printable import printable, printable_lines
from llmdebug_nb.show import logits as shown
from llmdebug_nb.show.figure import data_url
from llmdebug_nb.show.html import render
from llmdebug_nb.show.logits import Words
from llmdebug_nb.show.logits_figure import strip

_STRIP = 2000  # tokens in the strip of a page


def fragment(result: LogitsResult, word: Words) -> str:
    """Return verdict, strip of tokens, picture, worst tokens and notes, for an output cell."""
    return str(render("logits.html", **_parts(result, word)))


def page(result: LogitsResult, word: Words) -> str:
    """Return a whole page that needs nothing from outside."""
    return str(render("logits_page.html", title="logits", **_parts(result, word)))


def _parts(result: LogitsResult, word: Words) -> dict[str, object]:
    picture = data_url(strip(result, word)) if result.tokens else ""
    columns, cells, more = shown.worst(result, word)
    return {
        "head": printable_lines(shown.head(result, word)),
        "tokens": [_box(result, each, word) for each in result.tokens[:_STRIP]],
        "more": max(0, len(result.tokens) - _STRIP),
        "picture": Markup(picture),
        "columns": columns,
        "cells": cells,
        "left": more,
        "tail": printable_lines(shown.tail(result)),
    }


def _box(result: LogitsResult, each: TokenCheck, word: Words) -> dict[str, str]:
    """Return text, state and tooltip of a token."""
    state = "fail" if not each.passed else "flip" if each.flipped else "same"
    golden, mine = (printable(word(token)) for token in each.best)
    kl = "unknown" if each.kl is None else f"{each.kl:.3g}"
    p = " to ".join(f"{x:.3g}" for x in each.probability)
    tip = f"{shown.where(result, each)}: KL {kl}, rank {each.rank}, probability {p}; {each.why}"
    return {"text": golden, "other": mine if each.flipped else "", "state": state, "tip": tip}
