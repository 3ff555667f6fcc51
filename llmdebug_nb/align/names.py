"""The user's map: pairs of modules, or of operator types, one of golden and one of mine."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmdebug_nb.align.reasons import Reason, Why
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.paths import is_operator, module_of

if TYPE_CHECKING:
    import yaml

UPSTREAM = "op_mapping_file.json"  # the one file name that msit reads
_SECTIONS = ("paths", "types")
_HELP = (
    "write golden's name: mine's name, with * for any text: "
    "'transformer.h.*.mlp: model.layers.*.mlp'"
)
_TYPE = re.compile(r"([A-Za-z0-9_.]*?)(?:_(?:outtensor|output_)(\d+))?")


class _Output(NamedTuple):
    """An output of an operator type."""

    type: str
    slot: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the mapping.

    ``golden``: a path with ``*`` for any text. ``mine``: the corresponding paths; several if mine
    splits the module, none if the user leaves it out. ``text``: the entry and its place.
    """

    golden: str
    mine: tuple[str, ...]
    text: str

    def apply(self, path: str) -> tuple[str, ...] | None:
        """Return the paths that correspond to ``path``; None if the rule is for other paths."""
        match = _glob(self.golden).fullmatch(path)
        if match is None:
            return None
        return tuple(_filled(target, match.groups()) for target in self.mine)


@functools.lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))))


def _filled(target: str, texts: Sequence[str]) -> str:
    """Replace the stars of mine's path by the texts that golden's stars matched."""
    parts = target.split("*")
    texts = [*texts[: len(parts) - 1], ""]
    return "".join(part + text for part, text in zip(parts, texts, strict=True))


@dataclass(frozen=True, slots=True)
class Names:
    """A mapping that was read.

    ``rules``: in the order written; the first that fits a path counts. ``types``: groups of
    equivalent types. ``outputs``: pairs of equivalent outputs. ``parts``: any part of its name
    selects a type, as in msit.
    """

    rules: tuple[Rule, ...] = ()
    types: tuple[frozenset[str], ...] = ()
    outputs: tuple[tuple[_Output, _Output], ...] = ()
    parts: bool = False

    def kind(self, op: str) -> str:
        """Return one name for all types that the mapping calls equivalent."""
        for group in self.types:
            if any(self._is_meant(name, op) for name in group):
                return min(group)
        return op

    def same_output(self, golden: tuple[str, str], mine: tuple[str, str]) -> bool:
        """Tell whether the mapping calls two outputs (type, slot) equivalent."""
        return any(
            (g.slot, m.slot) == (golden[1], mine[1])
            and self._is_meant(g.type, golden[0])
            and self._is_meant(m.type, mine[0])
            for pair in self.outputs
            for g, m in (pair, pair[::-1])
        )

    def _is_meant(self, name: str, op: str) -> bool:
        return name == op or (self.parts and name in op)

    def resolve(
        self, golden: Iterable[str], mine: Iterable[str]
    ) -> dict[str, tuple[tuple[str, ...], Why]]:
        """Return golden's path -> mine's paths and the reason.

        A rule for a module holds for everything inside it.

        Raises:
            OptionError: a rule that fits no path of golden, or leads to none of mine.
        """
        theirs, paths = set(mine), list(golden)
        partners: dict[str, tuple[tuple[str, ...], Why]] = {}
        used: dict[Rule, bool] = {}
        for path in paths:
            for rule, targets in self._applied(path):
                there = tuple(target for target in targets if target in theirs)
                used[rule] = used.get(rule, False) or bool(there) or not targets
                if there or not targets:
                    partners[path] = there, Why(Reason.MAPPED, f": {rule.text}")
                    break
        for rule in self.rules:
            if not used.get(rule):
                raise OptionError(_unused(rule, paths, theirs, rule in used))
        return partners

    def _applied(self, path: str) -> Iterable[tuple[Rule, tuple[str, ...]]]:
        """Yield the rule for a path and its targets; then those for the modules around it."""
        outer, rest = path, ""
        while True:
            for rule in self.rules:
                targets = rule.apply(outer)
                if targets is not None and (not rest or len(targets) < 2):
                    yield rule, tuple((t + rest).lstrip(".") if rest else t for t in targets)
                    break
            if not outer:
                return
            outer = module_of(outer) if is_operator(outer) else outer.rpartition(".")[0]
            rest = path[len(outer) :] if outer else "." + path


def _unused(rule: Rule, golden: Iterable[str], mine: Iterable[str], fits: bool) -> str:
    """Explain why a rule has no effect. ``fits``: golden has such a path."""
    if fits:
        wanted = " or ".join(rule.mine)
        return f"mapping {rule.text}: mine has no {wanted}{nearest(rule.mine[0], mine)}"
    if any(rule.apply(path) for path in mine):
        return f"mapping {rule.text}: only mine has {rule.golden}; golden's name comes first"
    return f"mapping {rule.text}: golden has no {rule.golden}{nearest(rule.golden, golden)}"


def read(mapping: Names | Mapping[str, object] | str | os.PathLike[str] | None) -> Names:
    """Read a mapping: a dict, a YAML or JSON file, or a folder with msit's file. None is empty.

    ``{golden's path: mine's path}`` with ``*`` for any text; a list if several modules correspond
    to a fused one, null if none does. Or two sections: ``paths`` with such entries and ``types``
    with ``{golden's type: mine's type, or several}``. msit's file is ``op_mapping_file.json``.

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
    file = _File(path)
    return _names(file.entries(), file.place, upstream=path.name == UPSTREAM)


Place = Callable[[object], str]  # describes the place of a key
Entries = list[tuple[object, object]]  # keys and values


class _File:
    """A YAML or JSON file of a mapping, which knows the line of each key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[object, int] = {}

    def place(self, key: object) -> str:
        return f"{self._path}, line {self._lines.get(key, 1)}, {key!r}"

    def entries(self) -> Entries:
        """Return the keys and values; the value of a section is a list of such."""
        import yaml

        path = self._path
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                text = text.replace("\t", " ")  # JSON allows tabs between tokens, YAML does not
            tree = yaml.compose(text, Loader=yaml.SafeLoader)
            if tree is None:
                raise OptionError(f"mapping {path}: the file is empty; {_HELP}")
            return self._entries(tree, str(path))
        except OptionError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"mapping {str(path)!r} can't be read: {reason}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or error
            raise OptionError(f"mapping {path}{line}: {problem}; {_HELP}") from None

    def _entries(self, node: yaml.Node, where: str) -> Entries:
        import yaml

        if not isinstance(node, yaml.MappingNode):
            raise OptionError(f"mapping {where}: expected golden's names with mine's; {_HELP}")
        entries: Entries = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in [known for known, _ in entries]:
                first = self._lines[key]
                place = f"{self._path}, line {line}, {key!r}"
                raise OptionError(f"mapping {place}: a second time, after line {first}")
            self._lines[key] = line
            if key in _SECTIONS and isinstance(value_node, yaml.MappingNode):
                entries.append((key, self._entries(value_node, self.place(key))))
            else:
                entries.append((key, yaml.SafeLoader("").construct_object(value_node, True)))
        return entries


def _names(entries: Entries, place: Place, upstream: bool) -> Names:
    paths, types = _sections(entries, place, upstream)
    rules = tuple(_rule(key, value, place) for key, value in paths)
    groups: list[frozenset[str]] = []
    outputs: list[tuple[_Output, _Output]] = []
    for key, value in types:
        name, targets = _texts(key, value, place)
        members = [_type(text, name, place) for text in (name, *targets)]
        groups.append(frozenset(member.type for member in members))
        outputs += [(members[0], other) for other in members[1:] if other.slot and members[0].slot]
    return Names(rules, _united(groups), tuple(outputs), parts=upstream)


def _sections(entries: Entries, place: Place, upstream: bool) -> tuple[Entries, Entries]:
    """Return the entries for paths and those for types."""
    if upstream:
        return [], entries
    in_sections = entries and all(
        isinstance(key, str) and key in _SECTIONS and not isinstance(value, str)
        for key, value in entries
    )
    if not in_sections:
        return entries, []
    sections: dict[object, Entries] = {}
    for key, value in entries:
        items = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(items, list) or not all(isinstance(item, tuple) for item in items):
            raise OptionError(f"mapping {place(key)}: expected golden's names with mine's; {_HELP}")
        sections[key] = items
    return sections.get("paths", []), sections.get("types", [])


def _united(groups: list[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """Join the groups that share a type."""
    joined: list[frozenset[str]] = []
    for group in groups:
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*touching)]
    return tuple(joined)


def _rule(key: object, value: object, place: Place) -> Rule:
    name, targets = (str(key), ()) if value is None else _texts(key, value, place)
    for target in targets:
        if target.count("*") > name.count("*"):
            raise OptionError(
                f"mapping {place(key)}: {target!r} has more * than {key!r}, so nothing says what "
                "they stand for"
            )
    return Rule(name, targets, f"{place(key)} -> {', '.join(targets) or 'none'}")


def _texts(key: object, value: object, place: Place) -> tuple[str, tuple[str, ...]]:
    """Return key and values of an entry as texts. Raises OptionError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(key, str) or not isinstance(texts, (list, tuple)) or not texts:
        raise OptionError(f"mapping {place(key)}: {value!r} is not a name; {_HELP}")
    for text in texts:
        if not isinstance(text, str):
            raise OptionError(f"mapping {place(key)}: {text!r} is not a name; {_HELP}")
    return key, tuple(text.strip() for text in texts)


def _type(text: str, key: str, place: Place) -> _Output:
    match = _TYPE.fullmatch(text)
    if not match or not match[1]:
        examples = "LinearOperation, LinearOperation_outtensor0 or Linear_output_0"
        raise OptionError(f"mapping {place(key)}: {text!r}; expected a type such as {examples}")
    return _Output(match[1], match[2] or "")
