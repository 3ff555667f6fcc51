"""Dynamic control: a JSON file selects the calls to record, and is read again when it changes.

    {"enable": true, "steps": "0-3", "ids": ["model.layers.0*", "0_2"], "ranks": "0,2"}

or in msit's form (`dump_config`; all values are texts, an empty one means the default):

    {"dump_enable": "true", "er": "0,1", "ids": "0_2", "child": "true", "device": "cuda0"}

Every field may be left out: recording is then enabled, and the recording's own options hold. A new
text in ``alarm`` raises an alarm: it keeps the steps that the option ``last`` has on hand. In
msit's form, ``ids`` are execution ids (docs/topology.md). In ours, they are globs over module
paths, or places in the module tree (``0_2``: third child of the first child of the root), which the
explorer and `llmdebug info` show. A file that is missing, wrong or half written changes nothing; an
error in it is reported once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.msit_rounds import Rounds
from llmdebug_nb.core.option_parsing import TokenSet, device_name, execution_ids

FIELDS = ("enable", "steps", "ids", "ranks", "alarm")
MSIT_FIELDS = ("dump_enable", "er", "ids", "child", "device")
_SETTLED = 500_000_000  # nanoseconds after which a file is no longer being written


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """The settings in a control file; None leaves the choice to the recording's options.

    ``calls``: execution ids; ``children``: calls inside of those, too. ``device``: only models on
    it; "" for any. ``alarm``: why the last steps are to be kept; "" for no reason.
    """

    enable: bool = True
    steps: TokenSet | None = None
    ids: tuple[str, ...] | None = None
    ranks: TokenSet | None = None
    rounds: Rounds | None = None
    calls: tuple[str, ...] | None = None
    children: bool = True
    device: str | None = None
    alarm: str = ""

    def selects(self, path: str, places: tuple[str, ...]) -> bool:
        """Return whether ``ids`` select a module by its path or its places in the tree."""
        return self.ids is None or any(one in places or fnmatchcase(path, one) for one in self.ids)


def read_settings(text: str) -> ControlSettings:
    """Read the text of a control file. Raises OptionError."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise OptionError(
            f"expected an object with {', '.join(FIELDS)}, not {type(fields).__name__}"
        )
    if any(name in fields for name in MSIT_FIELDS if name != "ids"):
        return _msit_settings(fields)
    _refuse_unknown(fields, FIELDS)
    enable = fields.get("enable", True)
    if not isinstance(enable, bool):
        raise OptionError(f"enable {enable!r}: expected true or false")
    alarm = fields.get("alarm", "")
    if not isinstance(alarm, str):
        raise OptionError(f"alarm {alarm!r}: expected a text that says why")
    steps, ranks = (
        None if fields.get(name) is None else TokenSet.parse(fields[name], name)
        for name in ("steps", "ranks")
    )
    return ControlSettings(enable, steps, _module_ids(fields.get("ids")), ranks, alarm=alarm)


def _msit_settings(fields: Mapping[str, object]) -> ControlSettings:
    """Read msit's form. Every value is a text; only ``"true"`` enables recording."""
    _refuse_unknown(fields, MSIT_FIELDS)
    texts = dict.fromkeys(MSIT_FIELDS, "")
    for name, value in fields.items():
        if not isinstance(value, str):
            example = str(value).lower()
            raise OptionError(f'{name} {value!r}: expected a text in quotes, such as "{example}"')
        texts[name] = value.strip()
    if texts["child"].lower() not in ("", "true", "false"):
        raise OptionError(f'child {texts["child"]!r}: expected "true" or "false"')
    return ControlSettings(
        enable=texts["dump_enable"].lower() == "true",
        calls=execution_ids(texts["ids"]) if texts["ids"] else (),
        rounds=Rounds.parse(texts["er"], "er"),
        children=texts["child"].lower() != "false",
        device=device_name(texts["device"]) if texts["device"] else "",
    )


def _refuse_unknown(fields: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise OptionError(
                f"field {name!r} is not known{nearest(name, known)}; known: {', '.join(known)}"
            )


def _module_ids(value: object) -> tuple[str, ...] | None:
    items = value.split(",") if isinstance(value, str) else value
    if items is not None and not (
        isinstance(items, list) and all(isinstance(item, str) for item in items)
    ):
        raise OptionError(f"ids {value!r}: expected module paths, globs or places such as 0_2")
    return tuple(re.sub(r"\s", "", item) for item in items) if items else None


class ControlFile:
    """A control file that is followed.

    ``settings``: those that hold now. ``problem``: why its last change was not taken over, or None;
    it is also reported once on stderr.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OptionError if the file can't be read, or has an error already at the start."""
        self._path = Path(path)
        try:
            self._modified = os.stat(self._path).st_mtime_ns
            self.settings = read_settings(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f'control file {path}: {error}; write one such as {{"enable": true}}'
            ) from None
        except OptionError as error:
            raise OptionError(f"control file {path}: {error}") from None
        self.problem: str | None = None
        self._unreported = False

    def changed(self) -> bool:
        """Read the file again if it was written since; return whether other settings hold now.

        In most cases this is one `stat`.
        """
        modified = self._modified
        try:
            modified = os.stat(self._path).st_mtime_ns
            if modified == self._modified:
                self._report(modified)
                return False
            self._modified = modified
            settings = read_settings(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, OptionError) as error:
            self.problem = f"control file {self._path.name}: {error}"
            self._unreported = not isinstance(error, FileNotFoundError)
            self._report(modified)
            return False
        self.problem, self._unreported = None, False
        changed, self.settings = settings != self.settings, settings
        return changed

    def refuse(self, why: str) -> None:
        """Report that a setting of the file can't be met."""
        self.problem = f"control file {self._path.name}: {why}"
        print(f"llmdebug: {self.problem}", file=sys.stderr)

    def _report(self, modified: int) -> None:
        """Report the problem, unless the file may have been half written when it was read."""
        if self._unreported and time.time_ns() - modified > _SETTLED:
            self._unreported = False
            print(f"llmdebug: {self.problem}; its earlier settings still hold", file=sys.stderr)
