"""`DumpConfig`: what is recorded, said in msit's words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import DumpOptions

_MSIT = {
    "path": "dump_path",
    "tokens": "token_range",
    "layers": "layer_name",
    "types": "module_list",
    "apis": "api_list",
}


class DumpConfig:
    """The parameters of `msit_llm.DumpConfig`, for the same capture (contract: msit 8.2 `dump/torch_dump`).

    An ordinary object: as many as you like, each with its own values. ``layer_name`` may name paths as msit does
    (``root.model.layers.0``) or as a run does (``model.layers.0``); in it, only ``*`` stands for other text.
    ``api_list``: functions, names, or a YAML file, see `DumpOptions.apis`. ``analyze``: `register_hook` then leaves
    ``tensor_analyze.csv`` in the run's folder. ``dump_statistics_mode``: 0 and 2 keep tensors, 1 does not; statistics
    are always recorded. ``seed``: also makes operators deterministic while it records, see `determinism.seed_all`.

    Raises:
        OptionError: a value upstream refuses, or one that makes no sense.
    """

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        token_range: list[int] | None = None,
        analyze: bool = False,
        module_list: list[type] | None = None,
        api_list: Any = None,
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
        flags = {
            "analyze": analyze,
            "dump_last_logits": dump_last_logits,
            "dump_weight": dump_weight,
        }
        for option, flag in flags.items():
            if not isinstance(flag, bool):
                raise OptionError(f"{option} {flag!r}: expected True or False")
        if token_range is not None and not isinstance(token_range, (list, tuple, range)):
            raise OptionError(
                f"token_range {token_range!r}: expected a list of token numbers such as [0, 1]"
            )
        if tensor_part not in (0, 1, 2):
            raise OptionError(
                f"tensor_part {tensor_part!r}: expected 0 (inputs), 1 (outputs) or 2 (both)"
            )
        if dump_statistics_mode not in (0, 1, 2):
            raise OptionError(
                f"dump_statistics_mode {dump_statistics_mode!r}: expected 0, 1 (statistics only) or 2"
            )
        if device_id is not None and not isinstance(device_id, int):
            raise OptionError(f"device_id {device_id!r}: expected the number of a device")
        self.device_id, self.analyze = device_id, analyze
        try:
            self.options = DumpOptions.of(
                name=name,
                path=dump_path if dump_path is not None else "./",
                tokens=list(token_range) if token_range else [0],
                mode=mode or "module",
                phase="forward",
                part=("in", "out", "both")[tensor_part],
                layers=None if layer_name is None else _without_root(layer_name),
                types=module_list or None,
                apis=api_list or None,
                weights=dump_weight,
                logits=dump_last_logits,
                stats_only=dump_statistics_mode == 1,
                seed=seed,
            )
        except OptionError as error:  # named as it was given
            option, _, said = str(error).partition(" ")
            raise OptionError(f"{_MSIT.get(option, option)} {said}") from None


def _without_root(layer_name: Any) -> list[str]:
    """Return globs over paths for msit's pattern over names: they begin with ``root.``, and only ``*`` is special.

    What is left of the pattern once ``root.`` is matched may be several: ``*.norm`` leaves ``*.norm`` and ``norm``.
    """
    if not isinstance(layer_name, str) or not layer_name.strip():
        raise OptionError(
            f"layer_name {layer_name!r}: expected the name of a layer, with * for any text"
        )
    if layer_name == "root":
        raise OptionError(
            "layer_name 'root' is the whole model: leave it out, or name its class in module_list"
        )
    layer_name = re.sub(r"\*+", "*", layer_name)
    left = {layer_name}
    for character in "root.":
        left = {rest for pattern in left for rest in _rests(pattern, character)}
    whole = re.fullmatch(".*".join(map(re.escape, layer_name.split("*"))), "root")
    globs = {
        "?*" if pattern == "*" and not whole else _escaped(pattern) for pattern in left if pattern
    }
    return sorted(globs) or [_escaped(layer_name)]


def _rests(pattern: str, character: str) -> Iterator[str]:
    """Yield what is left to match of a pattern after one character."""
    if pattern.startswith("*"):
        yield pattern
        yield from _rests(pattern[1:], character)
    elif pattern.startswith(character):
        yield pattern[1:]


def _escaped(pattern: str) -> str:
    """Return a pattern in which only ``*`` is special as a glob."""
    return re.sub(r"([?[])", r"[\1]", pattern)
