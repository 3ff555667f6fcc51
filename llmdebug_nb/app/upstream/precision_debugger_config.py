"""Reading msprobe's ``config.json`` (26.x and earlier) into the options of a recording.

Every field is obeyed, or has no effect here (`_IDLE`, and the sections of other tasks), or is
refused by name (`_INSTEAD`, `_OTHER_TASKS`, `_OTHER_LEVELS`). docs/precision_debugger.md has the
table.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmdebug_nb.app.upstream.config_file import DumpSwitch, flag, load, wrong
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.options import EVERY_TOKEN, DumpOptions

# names of options in messages: ours to msprobe's
OPTION_NAMES = {
    "contains": "list", "tokens": "step", "ranks": "rank", "overflow": "overflow_nums",
    "path": "dump_path",
}  # fmt: skip
_MODES = {"L0": "module", "L1": "api", "mix": "module+api", "debug": "module"}
_OTHER_LEVELS = {
    "L2": "kernels of the device are not seen; use level L1, or ld.dump(mode='aten') for the"
    " dispatcher"
}
_SELECTION = ("scope", "list", "data_mode")
_SECTIONS = {
    "statistics": (*_SELECTION, "summary_mode", "tensor_list", "slice", "request_id"),
    "tensor": (
        *_SELECTION,
        "summary_mode",
        "slice",
        "request_id",
        "bench_path",
        "diff_nums",
        "file_format",
    ),
    "overflow_check": (*_SELECTION, "overflow_nums", "check_mode"),
}
_COMPARE = "record both runs, then ld.compare(golden, mine)"
_OVERFLOW = "use task overflow_check, which records the calls with NaN or infinity in them"
_OTHER_TASKS = {
    "structure": "run.nodes of any recording is the model tree; use task statistics",
    "nan_check": _OVERFLOW,
    "exception_dump": _OVERFLOW,
    "acc_check": f"operators are not replayed on another device; {_COMPARE}",
    "run_ut": f"operators are not replayed on another device; {_COMPARE}",
    "free_benchmark": f"inputs are not perturbed; {_COMPARE}",
    "diff_check": f"two runs are not compared while they run; {_COMPARE}",
    "grad_probe": "use task statistics with data_mode ['backward']",
}
_COMMON = (
    "task",
    "dump_path",
    "rank",
    "step",
    "level",
    "apis",
    "dump_enable",
    "extra_info",
    "async_dump",
    "precision",
    "risk_level",
    "enable_dataloader",
    "custom_op_namespaces",
    "load",
)
_IDLE: dict[str, tuple[object, ...]] = {
    "async_dump": (True, False),  # nothing ever waits for the device within a step
    "precision": ("low", "high"),  # mean and norm are always accumulated in float64
    "file_format": ("npy", "bin"),  # runs have one format; run.tensor() gives torch or NumPy
}
_INSTEAD = {
    "enable_dataloader": "call start(), stop() and step() in your loop",
    "custom_op_namespaces": "ld.dump(mode='aten') sees the operators of every namespace",
    "load": "inputs are only recorded, never replaced",
    "tensor_list": "use task tensor with these names as its list",
    "request_id": "the requests in a batch are not told apart; use slice",
    "bench_path": _COMPARE,
    "diff_nums": _COMPARE,
}
_FINGERPRINTS = {"statistics": "xxh3", "md5": "crc32", "xor": "xor"}
_DATA_MODES = ("all", "forward", "backward", "input", "output")
_MAX_DIM = 63


_NO_FIELDS: dict[str, Any] = {}
_NO_NAMES: list[str] = []
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DebuggerConfig:
    """What a debugger records. ``saves_only``: level debug, only tensors passed to `save`."""

    options: DumpOptions
    saves_only: bool
    switch: DumpSwitch


def read_config(
    config_path: str | os.PathLike[str] | None = None,
    *,
    task: str | None = None,
    dump_path: str | os.PathLike[str] | None = None,
    level: str | None = None,
    step: int | str | Sequence[int | str] | None = None,
    apis: str | os.PathLike[str] | Iterable[str] | None = None,
    name: str = "debugger",
) -> DebuggerConfig:
    """Read a config.json; arguments override its fields.

    Without either: task statistics, level L1, every step, in the runs folder.

    Raises:
        OptionError: an unreadable file; an unknown, refused, mistyped or contradictory field. One
            line names the value found, the value expected, and a remedy.
    """
    path = _path(config_path)
    values = {} if path is None else load(path)
    common = _Fields(
        values, "" if path is None else f"{path}: ", (*_COMMON, *_SECTIONS, *_OTHER_TASKS)
    )
    task = _known(*common.or_given("task", task), _SECTIONS, _OTHER_TASKS, "statistics")
    level = _known(*common.or_given("level", level), _MODES, _OTHER_LEVELS, "L1")
    common.read("risk_level", _all_risks, None)
    if dump_path is None:
        dump_path = common.read("dump_path", _place, None)
    for section in (*_SECTIONS, *_OTHER_TASKS):
        common.read(section, _section, _NO_FIELDS)
    chosen = _Fields(
        common.read(task, _section, _NO_FIELDS), f"{common.where}{task}.", _SECTIONS[task]
    )
    _refuse_contradictions(chosen, task, level)
    if apis is None:
        apis = common.read("apis", _apis, None)
    if apis and level in ("L0", "debug"):
        raise OptionError(f"{common.where}apis: level {level} records no operators; use L1 or mix")
    phase, part = chosen.read("data_mode", _data_mode, ("both", "both"))
    options = DumpOptions.of(
        name=name,
        path=dump_path,
        tokens=_steps(*common.or_given("step", step), EVERY_TOKEN),
        ranks=common.read("rank", _steps, None),
        mode=_MODES[level],
        phase=phase,
        part=part,
        apis=apis or None,
        contains=chosen.read("list", _list, _NO_NAMES),
        scope=chosen.read("scope", _texts, _NO_NAMES),
        slice=chosen.read("slice", _slice, None),
        stats_only=task == "statistics",
        overflow=chosen.read("overflow_nums", _overflow_nums, 1)
        if task == "overflow_check"
        else None,
        fingerprint=_FINGERPRINTS[chosen.read("summary_mode", _summary_mode, "statistics")],
        sources=common.read("extra_info", flag, True),
    )
    return DebuggerConfig(options, level == "debug", DumpSwitch(path, values))


class _Fields:
    """The fields of one section; None counts as absent. ``where``: put before a field's name."""

    def __init__(self, values: dict[str, Any], where: str, known: Iterable[str]) -> None:
        self.values, self.where, known = values, where, tuple(known)
        for name, value in values.items():
            if name not in known:
                raise _no_field(where, name, known)
            if name in _IDLE and value is not None and value not in _IDLE[name]:
                raise OptionError(
                    f"{where}{name} {reprlib.repr(value)}: expected {_either(_IDLE[name])}"
                )
            if name in _INSTEAD and value:
                raise OptionError(f"{where}{name} is not supported: {_INSTEAD[name]}")

    def read(self, name: str, check: Callable[[object, str, T], T], default: T) -> T:
        return check(self.values.get(name), self.where + name, default)

    def or_given(self, name: str, argument: object) -> tuple[object, str]:
        """Return the argument, or else the field; and its name in messages."""
        return (self.values.get(name), self.where + name) if argument is None else (argument, name)


# -- files ----------------------------------------------------------------------------------------


def _path(value: object) -> Path | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"config_path {reprlib.repr(value)}: expected the path of a config.json")
    return None if value is None else Path(value)


# -- values: each check takes the value, its name in messages, and the default -------------------


def _either(known: Iterable[Any]) -> str:
    return " or ".join(json.dumps(each) for each in known)


def _no_field(where: str, name: str, known: Iterable[str]) -> OptionError:
    shown = name if name.isidentifier() else reprlib.repr(name)
    return OptionError(f"{where}{shown[:60]}: no such field{nearest(name[:60], known)}")


def _known(
    value: object, what: str, known: Iterable[str], refused: dict[str, str], default: str
) -> str:
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(what, value, f"one of {', '.join(known)}")
    if value in refused:
        raise OptionError(f"{what} {value!r} is not supported: {refused[value]}")
    if value not in known:
        raise OptionError(f"{what} {reprlib.repr(value)} is not known{nearest(value[:60], known)}")
    return value


def _place(value: object, what: str, default: str | None) -> str | None:
    if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
        raise wrong(what, value, "a path")
    return default if value is None else value


def _section(value: object, what: str, default: dict[str, Any]) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise wrong(what, value, "an object with the fields of that task")
    return default if value is None else value


def _texts(value: object, what: str, default: list[str]) -> list[str]:
    if value is None or value == []:
        return default
    if not isinstance(value, list) or not all(
        isinstance(item, str) and item.strip() for item in value
    ):
        raise wrong(what, value, "a list of texts")
    return value


def _list(value: object, what: str, default: list[str]) -> list[str]:
    names = _texts(value, what, default)
    if any(name.startswith("name-regex(") for name in names):
        raise OptionError(
            f"{what}: name-regex(…) is not supported: give parts of names, as in"
            " ['relu', 'layers.3.mlp']"
        )
    return names


def _apis(
    value: object, what: str, default: str | Sequence[str] | None
) -> str | Sequence[str] | None:
    """Read names of operators, or the path of a YAML file of them."""
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        return value
    return _texts(value, what, []) or default


def _steps(value: object, what: str, default: TokenSet | str | None) -> TokenSet | str | None:
    """Read numbers and inclusive ranges: ``[0, 2, "4-6"]``; an empty list is all of them."""
    if isinstance(value, (list, tuple, range)):
        items = list(value)
    else:
        items = [] if value is None else [value]
    if not all(
        _is_number(item) or (isinstance(item, str) and re.fullmatch(r"\d{1,9}(-\d{1,9})?", item))
        for item in items
    ):
        raise wrong(what, value, 'a list of numbers and ranges such as [0, 2, "4-6"]')
    return TokenSet.parse(items, what) if items else default


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _all_risks(value: object, what: str, default: None) -> None:
    if value in ("CORE", "FOCUS"):
        raise OptionError(
            f"{what} {value!r} is not supported: operators have no classes here; name them in list"
        )
    if value not in (None, "ALL"):
        raise wrong(what, value, '"ALL"')


def _summary_mode(value: object, what: str, default: str) -> str:
    return _known(value, what, _FINGERPRINTS, {}, default)


def _data_mode(value: object, what: str, default: tuple[str, str]) -> tuple[str, str]:
    """Return phase and part; both words of a pair, or neither, mean both."""
    words = _texts(value, what, ["all"])
    unknown = next((word for word in words if word not in _DATA_MODES), None)
    if unknown is not None:
        raise OptionError(
            f"{what} {reprlib.repr(unknown)} is not known{nearest(unknown[:60], _DATA_MODES)}"
        )
    if "all" in words and len(words) > 1:
        raise OptionError(
            f"{what} {words!r}: all can't be combined with others; leave it out, or the others"
        )
    phases = [word for word in ("forward", "backward") if word in words]
    parts = [word for word in ("input", "output") if word in words]
    phase = phases[0] if len(phases) == 1 else default[0]
    return phase, parts[0] if len(parts) == 1 else default[1]


def _overflow_nums(value: object, what: str, default: int) -> int:
    """Return how many calls to record; 0 is any number, upstream's -1."""
    if value is None:
        return default
    if isinstance(value, int) and (value == -1 or (_is_number(value) and value)):
        return max(value, 0)
    raise wrong(what, value, "how many calls to record, 1 or more, or -1 for all")


def _slice(value: object, what: str, default: str | None) -> str | None:
    """Return upstream's ``[{dim, begin, end}, …]`` as an index: ``:, 0:4``."""
    if value is None or value == []:
        return default
    known, ranges = ("dim", "size", "begin", "end"), dict[int, str]()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong(what, value, 'a list such as [{"dim": 0, "begin": 0, "end": 4}]')
    for item in value:
        for name, number in item.items():
            if name not in known:
                raise _no_field(f"{what}.", name, known)
            if not isinstance(number, int) or isinstance(number, bool) or abs(number) >= 10**9:
                raise wrong(f"{what}.{name}", number, "a whole number")
        if "size" in item:
            raise OptionError(
                f"{what}.size is not supported: tensors are not chosen by their size; leave it out"
            )
        dim, begin, end = item.get("dim", 0), item.get("begin", 0), item.get("end")
        if not 0 <= dim <= _MAX_DIM or dim in ranges:
            raise wrong(f"{what}.dim", dim, f"a dimension from 0 to {_MAX_DIM}, each one once")
        if end is not None and (begin < 0) == (end < 0) and end <= begin:
            raise OptionError(
                f"{what}: from {begin} to {end} there is nothing; end is not included"
            )
        ranges[dim] = f"{begin}:{'' if end is None else end}"
    return ", ".join(ranges.get(dim, ":") for dim in range(max(ranges) + 1))


def _refuse_contradictions(chosen: _Fields, task: str, level: str) -> None:
    """Refuse fields that are valid but contradict each other; name both."""
    where = chosen.where
    summary = chosen.read("summary_mode", _summary_mode, "statistics")
    if summary != "statistics" and task != "statistics":
        what = " (which is CRC-32 of the bytes)" if summary == "md5" else ""
        raise OptionError(
            f"{where}summary_mode {summary!r}{what} goes with task statistics, not with task {task}"
        )
    if chosen.values.get("slice") and task != "tensor":
        raise OptionError(
            f"{where}slice goes with task tensor, not with task {task}: statistics are of whole"
            " tensors"
        )
    if chosen.values.get("check_mode") not in (None, "all"):
        mode = reprlib.repr(chosen.values["check_mode"])
        raise OptionError(f"{where}check_mode {mode} is not supported: use all")
    if level == "debug":
        if task == "overflow_check":
            raise OptionError(
                "task overflow_check and level debug exclude each other: debug records what save()"
                " is given"
            )
        for name in (*_SELECTION, "slice"):
            if chosen.values.get(name) not in (None, [], ["all"]):
                raise OptionError(
                    f"{where}{name} and level debug exclude each other: debug records what save()"
                    " is given"
                )
    for name in chosen.read("scope", _texts, _NO_NAMES):
        if level in ("L0", "L1") and name.startswith(("Module.", "Cell.")) != (level == "L0"):
            kind = (
                "modules, as in Module.fc1.Linear.forward.0"
                if level == "L0"
                else "operators, as in Functional.relu.0.forward"
            )
            raise OptionError(f"{where}scope {reprlib.repr(name)}: level {level} records {kind}")
