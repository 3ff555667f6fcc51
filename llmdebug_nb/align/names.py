"""The user's map: which module or operator type of golden answers to which of mine."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import OptionError, nearest

UPSTREAM = "op_mapping_file.json"  # the one name that msit reads
_SECTIONS = ("paths", "types")
_HELP = "write golden's name: mine's name, with * for any text: 'transformer.h.*.mlp: model.layers.*.mlp'"
_TYPE = re.compile(r"([A-Za-z0-9_.]*?)(?:_(?:outtensor|output_)(\d+))?")
_Output = tuple[str, str]  # a type and the slot of one of its outputs


@dataclass(frozen=True, slots=True)
class Rule:
    """``golden``: a path, ``*`` for any text. ``mine``: what answers to it, several for a fused one; none: left out."""

    golden: str
    mine: tuple[str, ...]
    said: str  # where it stands, and what it says

    def apply(self, path: str) -> tuple[str, ...] | None:
        """Return what answers to a path; None if the rule is not for it."""
        found = _glob(self.golden).fullmatch(path)
        if found is None:
            return None
        return tuple(_filled(target, found.groups()) for target in self.mine)


@functools.lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))))


def _filled(target: str, texts: Sequence[str]) -> str:
    """Put the texts that the stars of golden's side stood for in the place of mine's."""
    parts = target.split("*")
    return "".join(
        part + text for part, text in zip(parts, [*texts[: len(parts) - 1], ""], strict=True)
    )


@dataclass(frozen=True, slots=True)
class Names:
    """``rules``: in the order written, the first that fits a path counts. ``types``: groups of types that are one.

    ``outputs``: pairs of outputs that are one. ``parts``: a type is meant by any part of its name, as in msit.
    """

    rules: tuple[Rule, ...] = ()
    types: tuple[frozenset[str], ...] = ()
    outputs: tuple[tuple[_Output, _Output], ...] = ()
    parts: bool = False

    def kind(self, op: str) -> str:
        """Return one name for all types that the map says are the same."""
        for group in self.types:
            if any(self._meant(name, op) for name in group):
                return min(group)
        return op

    def same_output(self, golden: _Output, mine: _Output) -> bool:
        """Tell whether the map says of two outputs, by type and slot, that they are one."""
        return any(
            (g[1], m[1]) == (golden[1], mine[1])
            and self._meant(g[0], golden[0])
            and self._meant(m[0], mine[0])
            for pair in self.outputs
            for g, m in (pair, pair[::-1])
        )

    def _meant(self, name: str, op: str) -> bool:
        return name == op or (self.parts and name in op)

    def resolve(
        self, golden: Iterable[str], mine: Iterable[str]
    ) -> dict[str, tuple[tuple[str, ...], str]]:
        """Return path of golden -> paths of mine and why. What is said of a module holds for what is in it.

        Raises:
            OptionError: a rule that fits no path of golden, or leads to none of mine.
        """
        theirs, paths = set(mine), list(golden)
        found: dict[str, tuple[tuple[str, ...], str]] = {}
        used: dict[Rule, bool] = {}
        for path in paths:
            for rule, targets in self._applied(path):
                there = tuple(target for target in targets if target in theirs)
                used[rule] = used.get(rule, False) or bool(there) or not targets
                if there or not targets:
                    found[path] = there, f"user map: {rule.said}"
                    break
        for rule in self.rules:
            if not used.get(rule):
                raise OptionError(_unused(rule, paths, theirs, rule in used))
        return found

    def _applied(self, path: str) -> Iterable[tuple[Rule, tuple[str, ...]]]:
        """Yield the rule for a path and what it leads to; then the one for what the path lies in, and so on."""
        inner, cut = path, ""
        while True:
            for rule in self.rules:
                targets = rule.apply(inner)
                if targets is not None and (not cut or len(targets) < 2):
                    yield rule, tuple((t + cut).lstrip(".") if cut else t for t in targets)
                    break
            if not inner:
                return
            inner = inner.partition("/")[0] if "/" in inner else inner.rpartition(".")[0]
            cut = path[len(inner) :] if inner else "." + path


def _unused(rule: Rule, golden: Iterable[str], mine: Iterable[str], fits: bool) -> str:
    if fits:
        return f"mapping {rule.said}: mine has no {' or '.join(rule.mine)}{nearest(rule.mine[0], mine)}"
    if any(rule.apply(path) for path in mine):
        return f"mapping {rule.said}: only mine has {rule.golden}; golden's name comes first"
    return f"mapping {rule.said}: golden has no {rule.golden}{nearest(rule.golden, golden)}"


def read(mapping: Any) -> Names:
    """Read a map: a dict, a YAML or JSON file, or a folder with msit's ``op_mapping_file.json``; None is none.

    ``{golden's path: mine's path}``, ``*`` for any text; a list where several modules answer to a fused one, null where
    none does. Or sections ``paths`` with these and ``types``: ``{golden's type: mine's type, or several}``.

    Raises:
        OptionError: names file, line and key.
    """
    if mapping is None:
        return Names()
    if isinstance(mapping, Names):
        return mapping
    if isinstance(mapping, Mapping):
        return _names(list(mapping.items()), lambda key: f"{key!r}", upstream=False)
    if not isinstance(mapping, (str, os.PathLike)):
        raise OptionError(f"mapping {mapping!r}: expected a dict, or a YAML or JSON file; {_HELP}")
    path = Path(mapping)
    path = path / UPSTREAM if path.is_dir() else path
    return _names(*_entries(path), upstream=path.name == UPSTREAM)


Said = Callable[[Any], str]


def _entries(path: Path) -> tuple[list[tuple[Any, Any]], Said]:
    """Return keys and values of a file, sections as lists of such, and what says where a key stands."""
    import yaml

    lines: dict[Any, int] = {}

    def said(key: Any) -> str:
        return f"{path}, line {lines.get(key, 1)}, {key!r}"

    def entries(node: Any, where: str) -> list[tuple[Any, Any]]:
        if not isinstance(node, yaml.MappingNode):
            raise OptionError(f"mapping {where}: expected names with what answers to them; {_HELP}")
        found: list[tuple[Any, Any]] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in [k for k, _ in found]:
                raise OptionError(
                    f"mapping {path}, line {line}, {key!r}: a second time, after line {lines[key]}"
                )
            lines[key] = line
            section = key in _SECTIONS and isinstance(value_node, yaml.MappingNode)
            value = (
                entries(value_node, said(key))
                if section
                else yaml.SafeLoader("").construct_object(value_node, True)
            )
            found.append((key, value))
        return found

    try:
        text = path.read_text(encoding="utf-8")
        tabs = path.suffix == ".json"  # there they may stand between the words, and nowhere else
        tree = yaml.compose(text.replace("\t", " ") if tabs else text, Loader=yaml.SafeLoader)
        if tree is None:
            raise OptionError(f"mapping {path}: the file is empty; {_HELP}")
        return entries(tree, str(path)), said
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"mapping {str(path)!r} can't be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise OptionError(
            f"mapping {path}{line}: {getattr(error, 'problem', None) or error}; {_HELP}"
        ) from None


def _names(entries: list[tuple[Any, Any]], said: Said, upstream: bool) -> Names:
    sections: dict[str, Any] = dict.fromkeys(_SECTIONS, ())
    keys = [key for key, _ in entries]
    if upstream:
        sections["types"] = entries
    elif (
        keys
        and all(isinstance(k, str) and k in _SECTIONS for k in keys)
        and not any(isinstance(v, str) for _, v in entries)
    ):
        sections |= {
            key: list(value.items()) if isinstance(value, Mapping) else value
            for key, value in entries
        }
    else:
        sections["paths"] = entries
    rules = tuple(_rule(key, value, said) for key, value in sections["paths"])
    groups: list[frozenset[str]] = []
    outputs: list[tuple[_Output, _Output]] = []
    for key, value in sections["types"]:
        targets = _texts(key, value, said)
        types = [_type(text, key, said) for text in (key, *targets)]
        groups.append(frozenset(name for name, _ in types))
        outputs += [(types[0], other) for other in types[1:] if other[1] and types[0][1]]
    return Names(rules, _united(groups), tuple(outputs), parts=upstream)


def _united(groups: list[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """Join the groups that have a type in common."""
    joined: list[frozenset[str]] = []
    for group in groups:
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*touching)]
    return tuple(joined)


def _rule(key: Any, value: Any, said: Said) -> Rule:
    targets = () if value is None else _texts(key, value, said)
    for target in targets:
        if target.count("*") > key.count("*"):
            raise OptionError(
                f"mapping {said(key)}: {target!r} has more * than {key!r}, so nothing says what they stand for"
            )
    return Rule(key, targets, f"{said(key)} -> {', '.join(targets) or 'none'}")


def _texts(key: Any, value: Any, said: Said) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(key, str) or not isinstance(texts, (list, tuple)) or not texts:
        raise OptionError(f"mapping {said(key)}: {value!r} is no name; {_HELP}")
    for text in texts:
        if not isinstance(text, str):
            raise OptionError(f"mapping {said(key)}: {text!r} is no name; {_HELP}")
    return tuple(text.strip() for text in texts)


def _type(text: str, key: str, said: Said) -> tuple[str, str]:
    found = _TYPE.fullmatch(text)
    if not found or not found[1]:
        what = (
            "expected a type such as LinearOperation, LinearOperation_outtensor0 or Linear_output_0"
        )
        raise OptionError(f"mapping {said(key)}: {text!r}; {what}")
    return found[1], found[2] or ""
