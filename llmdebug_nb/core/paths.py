"""Paths of modules and operators: ``model.layers.0.mlp`` and ``model.layers.0.mlp/Torch.addmm``.

Dots separate modules; the part behind a slash is an operator that ran in the module. The root
module's path is ``""``; paths of a second root start with its label: ``Llama~1.model``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

# Characters of a path: the longest of ours, an operator inside an operator, has 150. Who walks the
# tree needs a frame for each module of a path, and Python has 1,000.
LONGEST = 1000
_LONGEST_OPERATOR = 400  # of these; the rest are for its module
# Modules in one another. The deepest models nest 20, and Python recurses to 1000.
DEEPEST = 200
_CACHE = 100_000  # paths: more than a model of a thousand layers has
_OTHER_ROOT = re.compile(r"[^.~]*~\d+(\.|$)")
_SLASH = "\u2215"  # looks the same
_NUMBER = re.compile(r"\d+")
_SORTS = re.compile(r"\w+\.(sort|argsort|msort|topk)(\.\w+)?")


def module_path(name: str) -> str:
    """Return a module's name in torch as a path: a slash in it would begin an operator's name."""
    return name.replace("/", _SLASH)


def module_name(path: str) -> str:
    """Return the name in torch of a module's path."""
    return path.replace(_SLASH, "/")


def is_operator(path: str) -> bool:
    """Tell whether a path is that of an operator, not of a module."""
    return "/" in path


def module_of(path: str) -> str:
    """Return the module that a path is, or that its operator ran in."""
    return path.partition("/")[0]


def operator_of(path: str) -> str:
    """Return the operator's name, with those of the operators around it; "" for a module."""
    return path.partition("/")[2]


def sorts(op: str) -> bool:
    """Tell whether an operator, such as ``Torch.sort``, sorts what it is given."""
    return _SORTS.fullmatch(op) is not None


def bounded(path: str) -> str:
    """Return a path that every reader takes, which is nearly always the path itself.

    Of one that is too long or too deep, a hash stands in the middle: ``a.b--0f3c…--weight``.
    """
    if len(path) < DEEPEST:  # nearly all
        return path
    module, slash, operator = path.partition("/")
    module = _bounded(module, LONGEST - _LONGEST_OPERATOR)
    return f"{module}{slash}{_bounded(operator, _LONGEST_OPERATOR - 1)}"


def _bounded(name: str, longest: int) -> str:
    if len(name) <= longest and name.count(".") < DEEPEST:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    head = ".".join(name[: longest // 2].split(".")[: DEEPEST // 2])
    last = name.rpartition(".")[2][-(longest // 4) :]
    return f"{head}--{digest}--{last}"


def parent_of(path: str) -> str:
    """Return the path of the module that holds a module; "" for the root and its children."""
    return path.rpartition(".")[0]


def common_ancestor(paths: Sequence[str]) -> str:
    """Return the innermost module that holds all these modules, or is one of them."""
    parts = [path.split(".") if path else [] for path in paths]
    common = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
    return ".".join(each[0] for each in common)


def within(path: str, ancestor: str) -> bool:
    """Tell whether ``path`` is ``ancestor`` or lies below it."""
    if ancestor == "":
        return _OTHER_ROOT.match(path) is None
    return path == ancestor or path.startswith((ancestor + ".", ancestor + "/"))


@functools.lru_cache(_CACHE)
def ancestors(path: str) -> list[str]:
    """Return the paths that hold this one, the innermost first; they end with the root's ``""``."""
    found = [path[: mark.start()] for mark in re.finditer(r"[./]", path)][::-1]
    return [*found, ""] if path and within(path, "") else found


@functools.lru_cache(_CACHE)
def any_layer(path: str) -> str:
    """Return a path with ``*`` for its numbers: the same for the same place in all layers."""
    return _NUMBER.sub("*", path)


def extra_numbers(path: str, other: str) -> tuple[str, ...]:
    """Return the last numbers of one path for which the other has none: they tell parts apart."""
    if path == other:
        return ()
    numbers = sorted((_numbers(each) for each in (path, other)), key=len)
    return numbers[1][len(numbers[0]) :]


@functools.lru_cache(_CACHE)
def _numbers(path: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(path))


@functools.lru_cache(_CACHE)
def matches(glob: str, path: str) -> tuple[bool, bool]:
    """Tell whether a glob matches a path, and whether it matches one that holds it."""
    return fnmatchcase(path, glob), any(fnmatchcase(above, glob) for above in ancestors(path))
