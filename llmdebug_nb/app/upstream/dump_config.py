"""`DumpConfig`: what to record, in msit's words."""

from __future__ import annotations

import os
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from llmdebug_nb.app.upstream.option_names import named_as
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.option_parsing import flag
from llmdebug_nb.core.options import MSIT_TOKENS, DumpOptions

OPTION_NAMES = {
    "path": "dump_path",
    "tokens": "token_range",
    "layers": "layer_name",
    "types": "module_list",
    "apis": "api_list",
    "weights": "dump_weight",
    "logits": "dump_last_logits",
}


class DumpConfig:
    """The parameters of `msit_llm.DumpConfig` (msit 8.2 ``dump/torch_dump``), with their meaning.

    Any number of configs may exist, each with its own values.

    Args:
        dump_path: the folder that will hold the run; default: the working directory.
        token_range: numbers of the tokens to record; default: the first one.
        analyze: True: `register_hook` also writes ``tensor_analyze.csv`` into the run's folder. As
            in msit, any other value is taken and writes none, with a warning where it counts as
            true. As in the older ``DumpConfig(path, [0], [Linear], 1)``, classes may stand here,
            and the part of the tensors behind them.
        module_list: module classes.
        api_list: operators: functions, names, or a YAML file, as the option ``apis`` of `dump`.
        tensor_part: 0 inputs, 1 outputs, 2 both.
        device_id: record only in processes whose model is on this device.
        dump_statistics_mode: 1 keeps statistics only; 0 and 2 also keep values.
        dump_last_logits: only the last logits of each step.
        mode: ``module``, ``api``, or both in a list.
        dump_weight: also the parameters.
        layer_name: a path as in msit (``root.model.layers.0``) or as in a run
            (``model.layers.0``), in which ``*`` stands for any text.
        seed: seed everything, and make operators deterministic during the recording (`seed_all`).
        name: name of the run.

    Raises:
        OptionError: an invalid value, or one that msit refuses.
    """

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        token_range: Sequence[int] | None = None,
        analyze: object = False,
        module_list: Iterable[type] | int | None = None,
        api_list: str | os.PathLike[str] | Iterable[str | Callable[..., object]] | None = None,
        tensor_part: int = 2,
        device_id: int | None = None,
        dump_statistics_mode: int = 0,
        dump_last_logits: bool = False,
        mode: str | list[str] | None = None,
        dump_weight: bool = False,
        layer_name: str | None = None,
        seed: int | None = None,
        name: str = "msit_dump",
    ) -> None:
        if isinstance(analyze, (list, tuple)):
            analyze, module_list, tensor_part = _older(analyze, module_list, tensor_part)
        elif isinstance(module_list, int):
            raise OptionError(f"module_list {module_list!r}: expected classes of modules in a list")
        if token_range is not None and not isinstance(token_range, (list, tuple, range)):
            raise OptionError(
                f"token_range {token_range!r}: expected a list of token numbers such as [0, 1]"
            )
        if device_id is not None and not isinstance(device_id, int):
            raise OptionError(f"device_id {device_id!r}: expected the number of a device")
        _check(tensor_part, "tensor_part", "0 (inputs), 1 (outputs) or 2 (both)")
        _check(dump_statistics_mode, "dump_statistics_mode", "0, 1 (statistics only) or 2")
        self.device_id, self.analyze = device_id, _is_true(analyze)
        with named_as(OPTION_NAMES):
            self.options = DumpOptions.of(
                name=name,
                path=dump_path if dump_path is not None else "./",
                tokens=list(token_range or MSIT_TOKENS),
                mode=mode or "module",
                phase="forward",
                part=("in", "out", "both")[tensor_part],
                layers=None if layer_name is None else globs_of(layer_name),
                types=module_list or None,
                apis=api_list or None,
                weights=flag(dump_weight, "dump_weight"),
                logits=flag(dump_last_logits, "dump_last_logits"),
                stats_only=dump_statistics_mode == 1,
                seed=seed,
            )


def _older(
    classes: Sequence[type], part: Iterable[type] | int | None, tensor_part: int
) -> tuple[bool, Sequence[type], int]:
    """Return analyze, module_list and tensor_part of ``(path, tokens, classes, part)``."""
    if part is None:
        return False, classes, tensor_part
    if isinstance(part, int) and not isinstance(part, bool):
        return False, classes, part
    raise OptionError(
        f"module_list {part!r}: the third argument has the classes, so the fourth is the"
        " tensor_part: 0 (inputs), 1 (outputs) or 2 (both)"
    )


def _is_true(analyze: object) -> bool:
    """Return whether it is True: msit 8.2 takes any value, and tests ``analyze is True``."""
    if analyze and analyze is not True:
        warnings.warn(
            f"analyze {reprlib.repr(analyze)}: tensor_analyze.csv is written for True alone, as in"
            " msit; a device is named by device_id=…",
            stacklevel=3,
        )
    return analyze is True


def _check(value: int, parameter: str, expected: str) -> None:
    if value not in (0, 1, 2):
        raise OptionError(f"{parameter} {value!r}: expected {expected}")


def globs_of(layer_name: str) -> list[str]:
    """Return globs over module paths for a pattern of msit's over names.

    Names begin with ``root.``, and only ``*`` is special in them. Removing ``root.`` may leave
    several patterns: ``*.norm`` leaves ``*.norm`` and ``norm``.
    """
    if not isinstance(layer_name, str) or not layer_name.strip():
        raise OptionError(
            f"layer_name {layer_name!r}: expected the name of a layer, with * for any text"
        )
    if layer_name == "root":
        raise OptionError(
            "layer_name 'root' is the whole model: leave it out, or name its class in module_list"
        )
    pattern = re.sub(r"\*+", "*", layer_name)
    remainders = {pattern}
    for character in "root.":
        remainders = {rest for each in remainders for rest in _after(each, character)}
    matches_root = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), "root")
    globs = {
        "?*" if rest == "*" and not matches_root else _escaped(rest) for rest in remainders if rest
    }
    return sorted(globs) or [_escaped(pattern)]


def _after(pattern: str, character: str) -> Iterator[str]:
    """Yield the remainders of a pattern after it has matched one character."""
    if pattern.startswith("*"):
        yield pattern
        yield from _after(pattern[1:], character)
    elif pattern.startswith(character):
        yield pattern[1:]


def _escaped(pattern: str) -> str:
    """Return a glob in which only ``*`` is special."""
    return re.sub(r"([?[])", r"[\1]", pattern)
