"""Which modules a dump keeps, and why it kept nothing: pure functions of names and types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.execution_ids import WantedIds
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.core.errors import nearest
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node


def keeps(options: DumpOptions, names: Iterable[str], kind: type | str) -> bool:
    """Tell whether a module of these names (path and aliases) and of this class, or of a class of that name, is asked for."""
    if options.layers and not any(
        fnmatchcase(name, glob) for glob in options.layers for name in names
    ):
        return False
    if (
        options.opname
        and not options.operators
        and not begins(kind if isinstance(kind, str) else kind.__name__, options.opname)
    ):
        return False
    return not options.types or any(_is(kind, wanted) for wanted in options.types)


def _is(kind: type | str, wanted: type | str) -> bool:
    if isinstance(kind, str):
        return kind == (wanted if isinstance(wanted, str) else wanted.__name__)
    if isinstance(wanted, str):
        return any(base.__name__ == wanted for base in kind.__mro__)
    return issubclass(kind, wanted)


def is_device(device: torch.device, wanted: str) -> bool:
    """Tell whether a device has that name (``cpu``, ``cuda0``, ``npu``) or number; as in msit, a number leaves the CPU alone."""
    if wanted.isdigit():
        return device.type == "cpu" or (device.index or 0) == int(wanted)
    return wanted in (device.type, f"{device.type}{device.index or 0}")


def begins(name: str, prefixes: Iterable[str]) -> bool:
    """Tell whether a class or an operator (``Aten.mm``) begins with one of these, in small letters, its level left aside or not."""
    name = name.lower()
    own = name.partition(".")[2]
    return any(name.startswith(prefix) or (own and own.startswith(prefix)) for prefix in prefixes)


def nothing_matches(options: DumpOptions, nodes: list[Node]) -> str:
    """Say which filter matched no module, with the nearest names that would have."""
    paths = [name for node in nodes for name in (node.path, *node.aliases) if name]
    kinds = sorted({node.type for node in nodes})
    if options.layers and not any(
        fnmatchcase(path, glob) for glob in options.layers for path in (*paths, "")
    ):
        globs = ", ".join(options.layers)
        near = nearest(options.layers[0].replace("*", ""), paths)
        return f"layers {globs!r} matches none of the {len(paths)} modules{near}"
    if options.types:
        wanted = ", ".join(t if isinstance(t, str) else t.__name__ for t in options.types)
        within = " under layers " + ", ".join(options.layers) if options.layers else ""
        return f"types {wanted!r} matches none of the module types{within}{nearest(wanted, kinds)}"
    if options.opname:
        return f"opname {', '.join(options.opname)!r} begins none of the module types{nearest(options.opname[0], kinds)}"
    return "the model has no modules"


def places(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """Return the place of every module in its tree by path.

    ``0_3_1`` is the second child of the fourth child of the first child of the root.
    """
    found: dict[str, tuple[str, ...]] = {}
    texts: list[str] = []
    children: Counter[int] = Counter()
    for node in nodes:
        number = children[node.parent]
        children[node.parent] += 1
        above = texts[node.parent] if node.parent >= 0 else ""
        texts.append((f"{above}_{number}" if above else str(number)) if node.parent >= 0 else "")
        found[node.path] = (texts[-1],)
    return found


def is_called_nowhere(module: nn.Module) -> bool:
    """Tell whether a module only holds others, which are called by the one around it: a ModuleList."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def counted(paths: Sequence[str], kept: Sequence[bool], holders: Sequence[bool]) -> list[bool]:
    """Tell of each module whether the execution ids of those kept are numbered by its calls: itself kept, or called by a module around one.

    ``holders``: modules that only hold others. All in the order of the tree, the root first.
    """
    held = {path for path, holds in zip(paths, holders, strict=True) if holds}

    def caller(path: str) -> str:
        path = path.rpartition(".")[0]
        while path in held:
            path = path.rpartition(".")[0]
        return path

    around: set[str] = set()
    for path, keep in zip(paths, kept, strict=True):
        while keep and path and caller(path) not in around:
            path = caller(path)
            around.add(path)
    return [
        keep or (path not in held and caller(path) in around)
        for path, keep in zip(paths, kept, strict=True)
    ]


def why_compiled(root: nn.Module) -> str | None:
    """Return why a model can't be recorded as it is: parts of it are compiled. None where none is."""
    for name, module in root.named_modules():
        where = f"its module {name!r}" if name else type(root).__name__
        functions = [] if pytorch.is_compiled(module) else pytorch.compiled_parts(module)
        if functions:
            where = f"the function {functions[0]!r} of {where}"
        if functions or pytorch.is_compiled(module):
            return (
                f"{where} is compiled by torch.compile, where hooks would be traced or never fire; record with"
                " force_eager=True, which runs it eagerly while it is recorded, or record the original module"
            )
    return None


def why_empty(
    options: DumpOptions,
    *,
    roots: Sequence[str],
    sessions: Sequence[str] = (),
    steps: Sequence[int],
    steps_came: bool,
    nodes: list[Node],
    kept: bool,
    names: Collection[str],
    ids: WantedIds,
    operators: Sequence[str] = (),
    enabled: bool,
    devices: Sequence[str],
    rank: int | None,
) -> str:
    """Say why nothing was recorded.

    ``roots``: types of the models followed, ``sessions``: of those that ONNX Runtime runs, and ``operators``: what their graphs have. ``steps``: seen; ``steps_came``: the options ask for one of them. ``kept``: any module is asked for.
    ``names``: full names of the calls seen, where the recording filters by them. ``ids``: likewise. ``rank``: of this
    process if it is asked for, else None. ``devices``: those of the models followed.
    """
    if sessions and not steps:
        return f"{sessions[0]} was not run in this block: its session's run() was never called"
    if not roots and not sessions:
        return "no module was called in this block; run a model in it"
    if not steps:
        return (
            f"neither {roots[0]} nor a part of it was called in this block (a method such as"
            " model.forward(...) goes past hooks: call model(...))"
        )
    if rank is None:
        return f"ranks {options.ranks} do not hold this process"
    if not enabled:
        return f"the control file {options.control} switched it off"
    if not kept and (sessions or not options.operators):
        return nothing_matches(options, nodes)
    if options.device is not None and not any(
        is_device(torch.device(each), options.device) for each in devices
    ):
        return f"device {options.device} was asked for, and the models ran on {', '.join(sorted(set(devices))) or 'none'}"
    if options.rounds is not None and not steps_came:
        return f"rounds {options.rounds} never came; steps seen: {steps[0]} to {steps[-1]}"
    if options.rounds is None and not steps_came:
        seen = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
        return f"tokens {options.tokens} never came; steps seen: {seen}"
    for option in ("contains", "scope"):
        wanted = getattr(options, option)
        if wanted and names:
            near = nearest(wanted[0], sorted(names))
            return (
                f"{option} {', '.join(wanted)!r} matches none of the {len(names)} calls seen{near}"
            )
    if ids.unmatched:
        return ids.why_none()
    if options.overflow is not None:
        return "no call overflowed: all results were finite"
    if (
        sessions
        and options.apis
        and not any(one in OperatorFilter(options.apis) for one in operators)
    ):
        return f"apis {', '.join(options.apis)!r} matches none of the graph's operators{nearest(options.apis[0], operators, 6)}"
    if options.opname:
        return f"no module or operator that begins with {', '.join(options.opname)!r} ran in the steps that were asked for"
    if options.operators and options.apis:
        return f"none of the operators {', '.join(options.apis)!r} ran in the modules and steps that were asked for"
    return "the modules that were asked for did not run in the steps that were"
