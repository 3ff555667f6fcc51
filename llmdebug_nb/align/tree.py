"""Pair the modules of two models, even if one was wrapped or changed.

Modules of the same path match, and so do those below a wrapper (``module.``, ``_orig_mod.``,
``base_model.model.`` or any other prefix). The remaining leaves are aligned as a sequence, by
type, parameter shapes, name and values. The modules around them follow from the leaves they hold.
A leaf without a partner may be fused from several leaves: neighbours in the matching parent, of one
parent themselves, whose parameters add up to its size. So are tensor-parallel parts in one process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from llmdebug_nb.align import sequence
from llmdebug_nb.align.modules import Kind, ModuleFacts, ModuleTree, Shapes
from llmdebug_nb.align.reasons import Reason, Why
from llmdebug_nb.align.sequence import CallFeatures
from llmdebug_nb.core import constants
from llmdebug_nb.core.layers import layer_of
from llmdebug_nb.core.paths import ancestors

Partners = dict[str, tuple[tuple[str, ...], Why]]  # golden's path -> mine's paths, and why
Match = Callable[[str, str, Why], None]


def partners(golden: ModuleTree, mine: ModuleTree, fixed: Partners, kind: Kind = str) -> Partners:
    """Return the partners of golden's modules. ``fixed``: the user's pairs, which stay."""
    found: Partners = dict(fixed)
    taken = {path for paths, _ in fixed.values() for path in paths}

    def match(path: str, partner: str, why: Why) -> None:
        if path not in found and partner not in taken:
            found[path] = (partner,), why
            taken.add(partner)

    _below_wrapper(golden, mine, match)
    for path in golden.modules:
        if path in mine.modules:
            match(path, path, Why(Reason.SAME_SITE))
    complete = len(taken) == len(mine.modules) or len(found) == len(golden.modules)
    if complete and _is_leaf_by_leaf(golden, mine, found):
        return found
    certain = dict(found)
    params = all(any(m.params for m in tree.modules.values()) for tree in (golden, mine))
    # leaves with parameters tell which layers are partners, and only in these are the other leaves
    unlike: list[tuple[str, str]] = []
    for weighted in (True, False) if params else (False,):
        unlike += _leaves(golden, mine, found, match, kind, params, weighted)
        _inner(golden, mine, found, taken, match, weighted)
    _fused(golden, mine, found, taken)
    _fused(mine, golden, found, taken, turned=True)
    _rest(golden, mine, found, taken, match)
    for left, right in unlike:
        match(left, right, Why(Reason.RENAMED, ": same place"))
    found |= fixed
    return found if _are_alike(golden, mine, found, params) else certain


def _is_leaf_by_leaf(golden: ModuleTree, mine: ModuleTree, found: Partners) -> bool:
    """Tell whether no leaf has a module of several leaves for its partner."""
    trees = golden.modules, mine.modules
    return not any(
        bool(trees[0][path].children) != bool(trees[1][other].children)
        for path, (others, _) in found.items()
        for other in others
        if path in trees[0] and other in trees[1]
    )


def _are_alike(golden: ModuleTree, mine: ModuleTree, found: Partners, params: bool) -> bool:
    """Tell whether most leaves of the smaller model have partners, whole or in parts.

    ``params``: both models have parameter shapes; then only leaves with parameters count.
    """
    partners = {path for paths, _ in found.values() for path in paths}
    counts = []
    for tree, paired in ((golden, found.keys()), (mine, partners)):
        leaves = [x for x in tree.leaves if not params or tree.modules[x].params]
        counts.append((len(leaves), len(paired & set(leaves))))
    size, matched = min(counts)
    return matched >= constants.MATCHED_SHARE * size


def _below_wrapper(golden: ModuleTree, mine: ModuleTree, match: Match) -> None:
    """Pair the modules of equal paths below a wrapper, if one model is wrapped."""
    wrapper = _wrapper(golden, mine)
    if wrapper is None:
        return
    left, right = wrapper
    why = Why(Reason.BELOW_WRAPPER, f" {(left or right).rstrip('.')!r}")
    for path in golden.modules:
        inner = "" if path == left.rstrip(".") else path.removeprefix(left)
        partner = (right + inner).rstrip(".")
        if (path + ".").startswith(left) and partner in mine.modules:
            match(path, partner, why)


def _wrapper(golden: ModuleTree, mine: ModuleTree) -> tuple[str, str] | None:
    """Return the prefixes of golden's and mine's paths below which most leaves have equal paths.

    One of the two is empty. None if no prefix is better than none.
    """
    same = sum(leaf in mine.modules for leaf in golden.leaves)
    best: tuple[int, tuple[str, str] | None] = (same, None)
    least = constants.MATCHED_SHARE * min(len(golden.leaves), len(mine.leaves))
    for left, right, turned in ((golden, mine, False), (mine, golden, True)):
        prefixes: Counter[str] = Counter()
        for leaf in right.leaves:
            parts = leaf.split(".")
            for i in range(1, len(parts)):
                if ".".join(parts[i:]) in left.modules:
                    prefixes[".".join(parts[:i]) + "."] += 1
        for prefix, count in prefixes.most_common(1):
            if count > best[0] and count >= least:
                best = count, (prefix, "") if turned else ("", prefix)
    return best[1]


def _leaves(
    golden: ModuleTree,
    mine: ModuleTree,
    found: Partners,
    match: Match,
    kind: Kind,
    params: bool,
    weighted: bool,
) -> list[tuple[str, str]]:
    """Align the leaves in the order in which they ran; leaves with a partner are fixed points.

    Return the pairs that have nothing but their place in common. ``weighted``: only leaves with
    parameters.
    """
    unlike = []
    numbers = _fixed_points(golden, mine, found)
    forth = {path: paths[0] for path, (paths, _) in found.items() if len(paths) == 1}
    layers = forth, {other: other for other in forth.values()}
    leaves, sides = [], []
    for tree, numbered, partner in zip((golden, mine), numbers, layers, strict=True):
        some = [x for x in tree.leaves if x in numbered or tree.modules[x].params or not weighted]
        leaves.append(some)
        sides.append(
            [
                CallFeatures("", anchor=numbered[leaf])
                if leaf in numbered
                else tree.features(leaf, kind, params, partner.get(layer_of(leaf), ""))
                for leaf in some
            ]
        )
    for i, j in sequence.align(sides[0], sides[1]):
        left, right = leaves[0][i], leaves[1][j]
        common = _common(golden.modules[left], mine.modules[right], params)
        if common:
            why = Why(Reason.RENAMED, f": same {', '.join(common)} and place")
            match(left, right, why)
        else:
            unlike.append((left, right))
    return unlike


def _fixed_points(
    golden: ModuleTree, mine: ModuleTree, found: Partners
) -> tuple[dict[str, int], dict[str, int]]:
    """Number the leaves that have one partner, itself a leaf: leaf -> number, for both sides."""
    theirs = set(mine.leaves)
    pairs = [
        (leaf, found[leaf][0][0])
        for leaf in golden.leaves
        if leaf in found and len(found[leaf][0]) == 1 and found[leaf][0][0] in theirs
    ]
    numbers = {other: number for number, (_, other) in enumerate(pairs, 1)}
    return {leaf: numbers[other] for leaf, other in pairs}, numbers


def _common(golden: ModuleFacts, mine: ModuleFacts, params: bool) -> list[str]:
    """Return the features that two leaves share."""
    common = ["type"] if golden.type == mine.type else []
    if golden.name and golden.name == mine.name:
        common.append("name")
    if params and (golden.params or mine.params):
        if golden.params == mine.params:
            common.append("parameter shapes")
        elif golden.size == mine.size:
            common.append("number of parameters")
    elif golden.output and mine.output and golden.output.shape == mine.output.shape:
        common.append("shape of the output")
    return common


def _inner(
    golden: ModuleTree,
    mine: ModuleTree,
    found: Partners,
    taken: set[str],
    match: Match,
    weighted: bool,
) -> None:
    """Pair the modules that hold exactly the partners of each other's leaves.

    ``weighted``: of those with parameters alone.
    """
    back = {paths[0]: path for path, (paths, _) in found.items() if len(paths) == 1}
    theirs: dict[frozenset[str], list[str]] = defaultdict(list)
    for path, module in mine.modules.items():
        if module.children:
            kept = (x for x in module.leaves if mine.modules[x].params or not weighted)
            held = frozenset(back[leaf] for leaf in kept if leaf in back)
            if held:
                theirs[held].append(path)
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for path, module in golden.modules.items():
        if module.children:
            kept = (x for x in module.leaves if golden.modules[x].params or not weighted)
            groups[frozenset(leaf for leaf in kept if leaf in found)].append(path)
    for held, paths in groups.items():
        left = [golden.modules[path] for path in paths if path not in found]
        right = [mine.modules[path] for path in theirs.get(held, ()) if path not in taken]
        for path, partner in _chain(left, right):
            match(path, partner, Why(Reason.RENAMED, ": it holds the same modules"))


def _rest(
    golden: ModuleTree, mine: ModuleTree, found: Partners, taken: set[str], match: Match
) -> None:
    """Pair the children with parameters that are left in two modules that belong together.

    They have one name, or as many parameters.
    """
    for path in golden.modules:  # parents come first, so what is found here has its children seen
        paths = found.get(path, ((), ""))[0]
        if len(paths) != 1:
            continue
        for one in golden.holding(path):
            free = [x for x in mine.holding(paths[0]) if x not in taken]
            name, size = golden.modules[one].name, golden.size(one)
            alike = [x for x in free if name and mine.modules[x].name == name]
            alike = alike or [x for x in free if mine.size(x) == size]
            if len(alike) == 1:
                match(one, alike[0], Why(Reason.RENAMED, ": what is left there"))


def _chain(golden: list[ModuleFacts], mine: list[ModuleFacts]) -> list[tuple[str, str]]:
    """Pair nested modules that all hold the same leaves: one by one, or by type and output."""
    if len(golden) == len(mine):
        return [(g.path, m.path) for g, m in zip(golden, mine, strict=True)]
    sides = [
        [
            CallFeatures(
                m.type, m.output.shape if m.output else (), m.name, m.output, shape_identifies=True
            )
            for m in side
        ]
        for side in (golden, mine)
    ]
    pairs = sequence.align(sides[0], sides[1])
    return [(golden[i].path, mine[j].path) for i, j in pairs]


def _fused(
    whole: ModuleTree, split: ModuleTree, found: Partners, taken: set[str], turned: bool = False
) -> None:
    """Pair a leaf with the leaves that it is split into. ``turned``: golden has these."""
    if turned:
        forth = {paths[0]: path for path, (paths, _) in found.items() if paths}
    else:
        forth = {path: paths[0] for path, (paths, _) in found.items() if paths}
    used: Mapping[str, object] | set[str] = found if turned else taken
    for leaf in whole.leaves:
        module = whole.modules[leaf]
        known = forth.get(leaf)
        if not module.params or (known is not None and not split.modules[known].children):
            continue
        parent = known or next((forth[path] for path in ancestors(leaf) if path in forth), None)
        if parent is None:
            continue
        free = [
            split.modules[path]
            for path in split.modules[parent].leaves
            if path not in used and split.modules[path].params
        ]
        parts = _parts(module, free)
        joint = [p for p in _joint(split, parts, module) if p == known or p not in used]
        if parts and turned:
            why = Why(Reason.FUSED, f": {len(parts)} in golden are one in mine")
            found |= dict.fromkeys((*joint, *parts), ((leaf,), why))
        elif parts:
            why = Why(Reason.FUSED, f": one in golden is {len(parts)} in mine")
            found[leaf] = (*joint, *parts), why
            taken.update(found[leaf][0])


def _joint(split: ModuleTree, parts: Sequence[str], whole: ModuleFacts) -> list[str]:
    """Return the innermost module that joins parts, and them alone: it gives what the whole does.

    Tensor-parallel parts are joined by a sum or a concatenation.
    """
    for path in ancestors(parts[0]) if parts else ():
        module = split.modules[path]
        weights = [leaf for leaf in module.leaves if split.modules[leaf].params]
        if weights != list(parts):
            break
        outputs = module.output, whole.output
        shapes = [output.shape[-1:] for output in outputs if output is not None]
        if len(shapes) == 2 and shapes[0] == shapes[1]:
            return [path]
    return []


def summands(partners: Partners) -> set[tuple[str, str]]:
    """Return the pairs of a whole and a part whose output another module joins with the others'."""
    fused = {
        (g, m) for g, (paths, why) in partners.items() if why.reason is Reason.FUSED for m in paths
    }
    return {
        (g, m)
        for g, m in fused
        if any((above, m) in fused for above in ancestors(g))
        or any((g, above) in fused for above in ancestors(m))
    }


def _parts(whole: ModuleFacts, free: list[ModuleFacts]) -> tuple[str, ...]:
    """Return neighbours of one parent whose parameters together have the size of the whole."""
    for count in range(constants.FUSED_LEAVES, 1, -1):
        for start in range(len(free) - count + 1):
            parts = free[start : start + count]
            parents = {part.path.rpartition(".")[0] for part in parts}
            if len(parents) == 1 and _adds_up(whole.params, [part.params for part in parts]):
                return tuple(part.path for part in parts)
    return ()


def _adds_up(whole: Shapes, parts: list[Shapes]) -> bool:
    """Tell whether the matrices of the parts, joined along one axis, have the size of the whole."""
    if sum(len(shape) > 1 for shape in whole) > 1:
        return False
    matrix = max(whole, key=len)
    pieces = [max(part, key=len) for part in parts]
    if len(matrix) != 2 or any(len(piece) != 2 for piece in pieces):
        return False
    for width, length in (matrix, matrix[::-1]):
        lengths = [b if a == width else a if b == width else 0 for b, a in pieces]
        if all(lengths) and sum(lengths) == length:
            return True
    return False
