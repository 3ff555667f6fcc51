"""What a user names in Python code of his own: ``file.py:name``, or ``package.module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType

from llmdebug_nb.core.errors import OptionError, first_line, nearest

FILE = ".py"


class UserCode:
    """Runs files and modules of the user, each once, and returns what they define."""

    def __init__(self) -> None:
        self._files: dict[Path, ModuleType] = {}

    def get(self, place: str | os.PathLike[str], option: str, example: str) -> object:
        """Return what ``place`` names. ``option``, ``example``: for messages: mine.py:psnr.

        Raises:
            OptionError: no such place, or its code fails.
        """
        where, _, name = os.fspath(place).rpartition(":")
        if not where or not name:
            raise OptionError(
                f"{option} {os.fspath(place)!r}: expected a file or a module, and a name in it,"
                f" such as {example}"
            )
        module = self._module(where, option)
        if not hasattr(module, name):
            near = nearest(name, (each for each in vars(module) if each[0] != "_"))
            raise OptionError(f"{option}: {where} defines no {name!r}{near}")
        return getattr(module, name)

    def _module(self, where: str, option: str) -> ModuleType:
        path = Path(where)
        if not where.endswith(FILE) and not path.is_file():
            try:
                return importlib.import_module(where)
            except (Exception, SystemExit) as error:  # the code is the user's
                missing = isinstance(error, ModuleNotFoundError) and error.name in _outer(where)
                raise _failed(option, where, error, missing) from None
        if not path.is_file():
            raise OptionError(f"{option}: there is no file {where}")
        known = path.resolve()
        if known not in self._files:
            self._files[known] = _run(path, option)
        return self._files[known]


def _failed(option: str, where: str, error: BaseException, missing: bool = False) -> OptionError:
    if missing:
        return OptionError(f"{option}: there is no module or file {where}")
    text = f"{type(error).__name__}: {first_line(error)}"
    return OptionError(f"{option}: {where} can't be run: {text}")


def _outer(module: str) -> set[str]:
    """Return a module and the packages around it."""
    parts = module.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


def _run(path: Path, option: str) -> ModuleType:
    """Run a file, as a module of a name that is free. Raises OptionError."""
    names = (f"{path.stem}{'_' * i}" for i in itertools.count())
    name = next(each for each in names if each not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{option}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(option, str(path), error) from None
    return module
