"""Dynamic control: a JSON file that says what to record from now on, read again whenever it changes.

    {"enable": true, "steps": "0-3", "ids": ["model.layers.0*", "0_2"], "ranks": "0,2"}

or, as msit's has it (`dump_config`, all values texts; nothing in one means the usual):

    {"dump_enable": "true", "er": "0,1", "ids": "0_2", "child": "true", "device": "cuda0"}

All fields may be left out: enabled, and as the recording's own options say. In msit's, ``ids`` are execution ids (docs/topology.md); in ours, globs over module
paths, or places in the model's tree (``0_2``: third child of the first child of the root), as the
explorer and `llmdebug info` show them. A file that is missing, wrong or only half written leaves things as they are; what is wrong is said once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.msit_rounds import Rounds
from llmdebug_nb.core.option_parsing import TokenSet, device_name, execution_ids

FIELDS = ("enable", "steps", "ids", "ranks")
MSIT_FIELDS = ("dump_enable", "er", "ids", "child", "device")
_SETTLED = (
    500_000_000  # nanoseconds after which a file is no longer taken for one that is being written
)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What a control file says; None where it leaves the choice to the recording's options.

    ``calls``: execution ids, and with ``children`` what lies below them. ``device``: only models there; "" for any.
    """

    enable: bool = True
    steps: TokenSet | None = None
    ids: tuple[str, ...] | None = None
    ranks: TokenSet | None = None
    rounds: Rounds | None = None
    calls: tuple[str, ...] | None = None
    children: bool = True
    device: str | None = None

    def asks_for(self, path: str, places: tuple[str, ...]) -> bool:
        """Tell whether ``ids`` name a module of this path, at these places in the tree."""
        return self.ids is None or any(one in places or fnmatchcase(path, one) for one in self.ids)


def read_settings(text: str) -> ControlSettings:
    """Read the text of a control file. Raises OptionError."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise OptionError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise OptionError(
            f"expected an object with {', '.join(FIELDS)}, not {type(fields).__name__}"
        )
    if any(name in fields for name in MSIT_FIELDS if name != "ids"):
        return _msit_orders(fields)
    _refuse_unknown(fields, FIELDS)
    enable = fields.get("enable", True)
    if not isinstance(enable, bool):
        raise OptionError(f"enable {enable!r}: expected true or false")
    steps, ranks = (
        None if fields.get(name) is None else TokenSet.parse(fields[name], name)
        for name in ("steps", "ranks")
    )
    return ControlSettings(enable, steps, _ids(fields.get("ids")), ranks)


def _msit_orders(fields: dict[str, Any]) -> ControlSettings:
    """Read what msit's file says. Every value is a text; only ``"true"`` enables."""
    _refuse_unknown(fields, MSIT_FIELDS)
    for name, value in fields.items():
        if not isinstance(value, str):
            raise OptionError(
                f'{name} {value!r}: expected a text in quotes, such as "{str(value).lower()}"'
            )
    texts = {name: fields.get(name, "").strip() for name in MSIT_FIELDS}
    if texts["child"].lower() not in ("", "true", "false"):
        raise OptionError(f'child {texts["child"]!r}: expected "true" or "false"')
    return ControlSettings(
        enable=texts["dump_enable"].lower() == "true",
        calls=execution_ids(texts["ids"]) if texts["ids"] else (),
        rounds=Rounds.parse(texts["er"], "er"),
        children=texts["child"].lower() != "false",
        device=device_name(texts["device"]) if texts["device"] else "",
    )


def _refuse_unknown(fields: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise OptionError(
                f"field {name!r} is not known{nearest(name, known)}; known: {', '.join(known)}"
            )


def _ids(value: Any) -> tuple[str, ...] | None:
    items = value.split(",") if isinstance(value, str) else value
    if items is not None and not (
        isinstance(items, list) and all(isinstance(item, str) for item in items)
    ):
        raise OptionError(f"ids {value!r}: expected module paths, globs or places such as 0_2")
    return tuple(re.sub(r"\s", "", item) for item in items) if items else None


class ControlFile:
    """Follows a control file.

    ``orders``: what holds now. ``trouble``: why its last change was not taken over, or None; said once, on stderr.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OptionError where the file can't be read or makes no sense: at the start, that is a mistake."""
        self._path = Path(path)
        try:
            self._seen = os.stat(self._path).st_mtime_ns
            self.orders = read_settings(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f'control file {path}: {error}; write one such as {{"enable": true}}'
            ) from None
        except OptionError as error:
            raise OptionError(f"control file {path}: {error}") from None
        self.trouble: str | None = None
        self._unsaid = False

    def changed(self) -> bool:
        """Read the file again if it was written since; True where other orders hold now. One `stat`, mostly."""
        when = self._seen
        try:
            when = os.stat(self._path).st_mtime_ns
            if when == self._seen:
                self._say(when)
                return False
            self._seen = when
            orders = read_settings(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, OptionError) as error:
            self.trouble = f"control file {self._path.name}: {error}"
            self._unsaid = not isinstance(error, FileNotFoundError)
            self._say(when)
            return False
        self.trouble, self._unsaid = None, False
        changed, self.orders = orders != self.orders, orders
        return changed

    def _say(self, when: int) -> None:
        """Say what is wrong with the file as it was written at ``when``, unless that may still be going on."""
        if self._unsaid and time.time_ns() - when > _SETTLED:
            self._unsaid = False
            print(f"llmdebug: {self.trouble}; what it said before still holds", file=sys.stderr)
