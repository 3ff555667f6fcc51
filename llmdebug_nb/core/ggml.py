"""What a recording of llama.cpp tells of a node of its graph, so that it can be computed again.

The text stands among the scalars of the node, role `ROLE`, slot `FACTS`. Shapes and strides are
ggml's: the fastest axis first.
"""

from __future__ import annotations

import msgspec

PREFIX = "Ggml."  # of the names of operators
PRODUCTS = (PREFIX + "MUL_MAT", PREFIX + "MUL_MAT_ID")  # with a weight, or of two results
ROLE = "ggml"  # of the scalars that describe a node
FACTS = "node"


class View(msgspec.Struct, omit_defaults=True):
    """How a source lies in the result of an earlier node. ``of``, ``tokens``: shape of that, and
    the axis of its tokens. ``nb``, ``offset``: bytes; no ``nb``: it is the whole result.
    """

    of: list[int]
    tokens: int | None = None
    nb: list[int] = []
    offset: int = 0


class Source(msgspec.Struct, omit_defaults=True):
    """A source of a node. ``slot``: of the input. ``type``: ggml's name. ``weight``: its name in
    the file. ``view``: None for a weight, and for an input that was read as the node sees it.
    """

    slot: int
    type: str
    ne: list[int]
    weight: str = ""
    view: View | None = None


class NodeFacts(msgspec.Struct, omit_defaults=True):
    """A node. ``ne``, ``tokens``: of its result, as in `View`. ``prefix``: of modules' paths in the
    dump. ``device``: where it was computed; "" for the host.
    """

    ne: list[int]
    sources: list[Source]
    tokens: int | None = None
    prefix: str = ""
    device: str = ""


def text_of(facts: NodeFacts) -> str:
    return msgspec.json.encode(facts).decode()


def read(text: str) -> NodeFacts:
    """Raises ValueError: it is no such text."""
    try:
        found = msgspec.json.decode(text, type=NodeFacts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    views = [each.view for each in found.sources if each.view is not None]
    shapes = [found.ne, *(each.ne for each in found.sources), *(view.of for view in views)]
    axes = [found.tokens, *(view.tokens for view in views)]
    if (
        any(len(ne) != _AXES or min(ne) < 0 for ne in shapes)
        or any(axis is not None and not 0 <= axis < _AXES for axis in axes)
        or any(view.offset < 0 or len(view.nb) not in (0, _AXES) for view in views)
    ):
        raise ValueError("a shape is none of ggml")
    return found


_AXES = 4  # of each tensor of ggml


def owner_of(weight: str) -> tuple[str, str]:
    """Return the module of a weight, and its name there: ``blk.0.attn_q`` and ``weight``."""
    owner, _, name = weight.rpartition(".")
    return owner, name
