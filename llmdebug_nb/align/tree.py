"""Which module of one model is which of another: re-wrapped, renamed or fused models.

Modules of the same path answer to each other, and so do those below a wrapper (``module.``, ``_orig_mod.``,
``base_model.model.``, or any other prefix). Of the rest the leaves are aligned as a sequence, by type, parameter
shapes, name and values; the modules around them follow, by the leaves that they hold. A leaf without a partner may be
several fused into one: next to each other, in the module that answers to the one that holds it, with parameters that
together have its size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.align import sequence
from llmdebug_nb.align.sequence import Token
from llmdebug_nb.core.records import Node, Record, Summary

SAME_PATH = "same site"
WRAPPED = "same path below a wrapper"
RENAMED = "renamed module"
FUSED = "fused module"
_ENOUGH = 0.5  # of the smaller model's leaves; less in common is chance
_MOST_PARTS = 4

Partners = dict[str, tuple[tuple[str, ...], str]]  # path of golden -> paths of mine, and why


@dataclass(slots=True)
class Module:
    """What is known of a module: from the topology and from what was recorded of it. ``place``: when it first ran."""

    path: str
    type: str = ""
    params: tuple[tuple[int, ...], ...] = ()
    place: float = float("inf")
    output: Summary | None = None
    weight: Summary | None = None
    children: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        name = self.path.rpartition(".")[2]
        return "" if name.isdigit() else name


class Tree:
    """The modules of a run, by path."""

    def __init__(self, nodes: Iterable[Node], records: Iterable[Record]) -> None:
        self.modules: dict[str, Module] = {}
        for node in nodes:
            module = self._module(node.path)
            module.type, module.params = node.type, _shapes(node.params.values())
        seen = 0
        for record in records:
            path, slash, _ = record.site.path.partition("/")
            module = self._module(path)
            if record.site.role == "weight":
                module.weight = module.weight or record.summary
                continue
            seen += 1
            if not slash:
                module.type = module.type or record.op
                module.place = min(module.place, seen)
                if record.site.role == "output" and record.site.phase == "forward":
                    module.output = module.output or record.summary
        self.leaves = [path for path, module in self.modules.items() if not module.children]
        ran = sum(self.modules[leaf].place < float("inf") for leaf in self.leaves)
        if ran * 2 > len(
            self.leaves
        ):  # the order of registration says less than the order of calls
            self.leaves.sort(key=lambda leaf: self.modules[leaf].place)
        for leaf in self.leaves:
            for path in above(leaf):
                if path in self.modules:
                    self.modules[path].leaves.append(leaf)

    def _module(self, path: str) -> Module:
        found = self.modules.get(path)
        if found is None:
            found = self.modules[path] = Module(path)
            if path:
                self._module(path.rpartition(".")[0]).children.append(path)
        return found

    def token(self, path: str, kind: Callable[[str], str], params: bool) -> Token:
        """Return a leaf as it is recognised; ``params``: by its parameters' shapes, which both models have."""
        m = self.modules[path]
        shape = m.params if params and m.params else (m.output.shape if m.output else ())
        return Token(
            kind(m.type), shape, m.name, m.weight or m.output, telling=bool(params and m.params)
        )


def above(path: str) -> Iterable[str]:
    """Yield a path and the paths of the modules that hold it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _shapes(sizes: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return shapes in which neither the order of parameters nor a transposition shows."""
    return tuple(sorted(tuple(sorted(size)) for size in sizes))


def partners(
    golden: Tree, mine: Tree, given: Partners, kind: Callable[[str], str] = str
) -> Partners:
    """Return what answers to each module of golden that has a partner. ``given``: by the user, and final."""
    found: Partners = dict(given)
    taken = {path for paths, _ in given.values() for path in paths}

    def match(path: str, partner: str, why: str) -> None:
        if path not in found and partner not in taken:
            found[path] = (partner,), why
            taken.add(partner)

    wrapper = _wrapper(golden, mine)
    if wrapper is not None:
        left, right = wrapper
        why = f"{WRAPPED} {(left or right).rstrip('.')!r}"
        for path in golden.modules:
            inner = "" if path == left.rstrip(".") else path.removeprefix(left)
            partner = (right + inner).rstrip(".")
            if (path + ".").startswith(left) and partner in mine.modules:
                match(path, partner, why)
    for path in golden.modules:
        if path in mine.modules:
            match(path, path, SAME_PATH)
    complete = len(taken) == len(mine.modules) or len(found) == len(golden.modules)
    if not complete and _leaves(golden, mine, found, match, kind):
        _inner(golden, mine, found, taken, match)
        _fused(golden, mine, found, taken)
        _fused(mine, golden, found, taken, turned=True)
    return found


def _wrapper(golden: Tree, mine: Tree) -> tuple[str, str] | None:
    """Return the prefixes of golden's and mine's paths (one of them empty) below which most leaves have the same path."""
    same = sum(leaf in mine.modules for leaf in golden.leaves)
    best: tuple[int, tuple[str, str] | None] = (same, None)
    for left, right, turned in ((golden, mine, False), (mine, golden, True)):
        prefixes: Counter[str] = Counter()
        for leaf in right.leaves:
            parts = leaf.split(".")
            for i in range(1, len(parts)):
                if ".".join(parts[i:]) in left.modules:
                    prefixes[".".join(parts[:i]) + "."] += 1
        for prefix, count in prefixes.most_common(1):
            if count > best[0] and count >= _ENOUGH * min(len(left.leaves), len(right.leaves)):
                best = count, (prefix, "") if turned else ("", prefix)
    return best[1]


Match = Callable[[str, str, str], None]


def _leaves(
    golden: Tree, mine: Tree, found: Partners, match: Match, kind: Callable[[str], str]
) -> bool:
    """Align the leaves as they ran; those that have a partner already stay where they are. False: the models have too little in common."""
    params = all(any(m.params for m in tree.modules.values()) for tree in (golden, mine))
    places = {leaf: j for j, leaf in enumerate(mine.leaves)}
    anchors = {leaf: places[found[leaf][0][0]] for leaf in golden.leaves if leaf in found and len(found[leaf][0]) == 1
               and found[leaf][0][0] in places}  # fmt: skip
    numbers = {j: number for number, j in enumerate(anchors.values(), 1)}
    sides: list[list[Token]] = []
    for tree, place in ((golden, anchors.get), (mine, places.get)):
        sides.append([])
        for leaf in tree.leaves:
            number = numbers.get(place(leaf, -1), 0)
            sides[-1].append(Token("", anchor=number) if number else tree.token(leaf, kind, params))
    pairs = [(golden.leaves[i], mine.leaves[j]) for i, j in sequence.align(sides[0], sides[1])]
    smaller = min(
        sum(bool(t.modules[leaf].params) or not params for leaf in t.leaves) for t in (golden, mine)
    )
    matched = [pair for pair in pairs if golden.modules[pair[0]].params or not params]
    if len(matched) < _ENOUGH * smaller:
        return False
    for left, right in pairs:
        match(
            left, right, f"{RENAMED}: {_alike(golden.modules[left], mine.modules[right], params)}"
        )
    return True


def _alike(golden: Module, mine: Module, params: bool) -> str:
    """Say what two leaves have in common."""
    common = [word for word, same in (("type", golden.type == mine.type), ("name", golden.name and golden.name == mine.name))
              if same]  # fmt: skip
    if params and golden.params:
        common.append("parameter shapes")
    elif golden.output and mine.output and golden.output.shape == mine.output.shape:
        common.append("shape of the output")
    return f"same {', '.join(common)} and place" if common else "same place"


def _inner(golden: Tree, mine: Tree, found: Partners, taken: set[str], match: Match) -> None:
    """Pair the modules around leaves: those that hold the partners of just the same leaves."""
    back = {paths[0]: path for path, (paths, _) in found.items() if len(paths) == 1}
    chains: dict[frozenset[str], list[str]] = defaultdict(list)
    for path, module in mine.modules.items():
        if module.children:
            held = frozenset(back[leaf] for leaf in module.leaves if leaf in back)
            if held:
                chains[held].append(path)
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for path, module in golden.modules.items():
        if module.children:
            groups[frozenset(leaf for leaf in module.leaves if leaf in found)].append(path)
    for held, paths in groups.items():
        left = [path for path in paths if path not in found]
        right = [path for path in chains.get(held, ()) if path not in taken]
        for path, partner in _chain(
            [golden.modules[p] for p in left], [mine.modules[p] for p in right]
        ):
            match(path, partner, f"{RENAMED}: it holds the same modules")


def _chain(golden: list[Module], mine: list[Module]) -> list[tuple[str, str]]:
    """Pair modules of which each holds all that the next one does: by type and output, the rest from the outside."""
    if len(golden) == len(mine):
        return [(g.path, m.path) for g, m in zip(golden, mine, strict=True)]
    sides = [[Token(m.type, m.output.shape if m.output else (), m.name, m.output, telling=True) for m in side]
             for side in (golden, mine)]  # fmt: skip
    pairs = sequence.align(sides[0], sides[1])
    return [(golden[i].path, mine[j].path) for i, j in pairs]


def _fused(
    whole: Tree, split: Tree, found: Partners, taken: set[str], turned: bool = False
) -> None:
    """Find the leaves of which several are one in the other model; ``turned``: it is golden that has the several."""
    forth = {paths[0]: path for path, (paths, _) in found.items() if paths} if turned else {
        path: paths[0] for path, (paths, _) in found.items() if paths
    }  # fmt: skip
    used: Mapping[str, object] | set[str] = found if turned else taken
    for leaf in whole.leaves:
        module = whole.modules[leaf]
        if leaf in forth or not module.params:
            continue
        holder = next(
            (forth[path] for path in above(leaf.rpartition(".")[0]) if path in forth), None
        )
        if holder is None:
            continue
        free = [
            path
            for path in split.modules[holder].leaves
            if path not in used and split.modules[path].params
        ]
        parts = _parts(module, [split.modules[path] for path in free])
        if parts and turned:
            for part in parts:
                found[part] = (leaf,), f"{FUSED}: {len(parts)} in golden are one in mine"
        elif parts:
            found[leaf] = parts, f"{FUSED}: one in golden is {len(parts)} in mine"
            taken.update(parts)


def _parts(whole: Module, free: list[Module]) -> tuple[str, ...]:
    """Return the modules next to each other whose parameters make up those of the whole."""
    for count in range(_MOST_PARTS, 1, -1):
        for start in range(len(free) - count + 1):
            parts = free[start : start + count]
            if _adds_up(whole.params, [part.params for part in parts]):
                return tuple(part.path for part in parts)
    return ()


def _adds_up(whole: tuple[tuple[int, ...], ...], parts: list[tuple[tuple[int, ...], ...]]) -> bool:
    """Tell whether the matrices of the parts, put together along one axis, have the size of the whole."""
    matrix = max(whole, key=len)
    pieces = [max(part, key=len) for part in parts]
    if len(matrix) != 2 or any(len(piece) != 2 for piece in pieces):
        return False
    for kept, summed in (matrix, matrix[::-1]):
        rest = [
            piece[0] if piece[1] == kept else piece[1] if piece[0] == kept else 0
            for piece in pieces
        ]
        if all(rest) and sum(rest) == summed:
            return True
    return False
