"""Which modules a dump keeps: pure functions of names and types."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from llmdebug_nb.errors import nearest
from llmdebug_nb.options import DumpOptions
from llmdebug_nb.records import Node


def keeps(options: DumpOptions, names: Iterable[str], kind: type) -> bool:
    """Tell whether a module of these names (path and aliases) and of this class is asked for."""
    if options.layers and not any(fnmatchcase(name, glob) for glob in options.layers for name in names):
        return False
    return not options.types or any(_is(kind, wanted) for wanted in options.types)


def _is(kind: type, wanted: type | str) -> bool:
    if isinstance(wanted, str):
        return any(base.__name__ == wanted for base in kind.__mro__)
    return issubclass(kind, wanted)


def nothing_matches(options: DumpOptions, nodes: list[Node]) -> str:
    """Say which filter matched no module, with the nearest names that would have."""
    paths = [name for node in nodes for name in (node.path, *node.aliases) if name]
    kinds = sorted({node.type for node in nodes})
    if options.layers and not any(fnmatchcase(path, glob) for glob in options.layers for path in (*paths, "")):
        globs = ", ".join(options.layers)
        near = nearest(options.layers[0].replace("*", ""), paths)
        return f"layers {globs!r} matches none of the {len(paths)} modules{near}"
    if options.types:
        wanted = ", ".join(t if isinstance(t, str) else t.__name__ for t in options.types)
        within = " under layers " + ", ".join(options.layers) if options.layers else ""
        return f"types {wanted!r} matches none of the module types{within}{nearest(wanted, kinds)}"
    return "the model has no modules"
