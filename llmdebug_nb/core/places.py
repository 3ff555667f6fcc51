"""Files of a program, named so that a dump tells nothing about whose machine it was made on.

    /home/ann/port/model.py                          model.py, if the program runs in /home/ann/port
    /opt/venv/lib/python3.11/site-packages/x/y.py    site-packages/x/y.py
    /usr/lib/python3.11/enum.py                      python3.11/enum.py
    /home/ann/other/run.py                           ~/other/run.py

Dumps hold these names. `found` goes the way back, on the machine where a dump is read.
"""

from __future__ import annotations

import functools
import getpass
import linecache
import os
import re
import site
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = re.compile(r"(?<![^\s\"'(),;=])[^\s\"'(),;=]*[\\/]((?:site|dist)-packages[\\/])")
_IN_PACKAGE = re.compile(r".*[\\/]((?:site|dist)-packages[\\/])", re.DOTALL)  # of a whole path
# where systems keep the folders of their users; the name ends at a separator, or with the word
_HOMES = re.compile(r"(?:/home|/Users|[A-Za-z]:\\+Users)[\\/]+[^\s\\/\"'(),;:]+")
_TORCH = r"(?:site|dist)-packages[\\/]torch[\\/]"
_USER = "<user>"
_SHORT = 3  # characters: a shorter name of a user is also a part of other names
_STDLIB = os.path.dirname(os.__file__) + os.sep
_SUFFIXES = (".py", ".pyi", ".ipynb", ".pyx")  # what a line of a program may stand in


def shown(file: str) -> str:
    """Return the name of a file of the program: in its package, its project, or the home."""
    package = _IN_PACKAGE.match(file)
    if package is not None:
        return package[1] + file[package.end() :]
    if file.startswith(_STDLIB):
        return os.path.basename(_STDLIB[:-1]) + os.sep + file[len(_STDLIB) :]
    here = _project()
    if here and file.startswith(here):
        return file[len(here) :]
    return scrubbed(file)


def scrubbed(text: str) -> str:
    """Return a text without the places of this machine that name a person.

    The home of any user becomes ``~``, the user's own name elsewhere in a path ``<user>``, and
    nothing is left before ``site-packages``.
    """
    if "/" not in text and "\\" not in text:
        return text
    text = _PACKAGES.sub(r"\1", text)
    home, user = _person()
    if home is not None:
        text = home.sub("~", text)
    text = _HOMES.sub("~", text)
    return text if user is None else user.sub(_USER, text)


def found(name: str, near: Path | None = None) -> str | None:
    """Return the file on this machine that `shown` or `scrubbed` named, if it is there.

    ``near``: a folder in or below the project, such as that of the run. Only files of Python count:
    a dump from a stranger can name any file, and its lines are shown.
    """
    if not name.endswith(_SUFFIXES):
        return None
    return next((str(file) for file in _candidates(name, near) if file.is_file()), None)


def line_at(name: str, line: int, near: Path | None = None) -> str:
    """Return a line of code, without the space around it; "" if there is none. See `found`."""
    file = found(name, near)
    return "" if file is None else linecache.getline(file, line).strip()


def expanded(name: str) -> str:
    """Return the place of this machine that `scrubbed` named: the way back for ``~``."""
    if _USER in name:
        name = name.replace(_USER, getpass.getuser())
    return os.path.expanduser(name) if name.startswith(("~/", "~\\")) else name


def _candidates(name: str, near: Path | None) -> Iterator[Path]:
    name = expanded(name)
    if os.path.isabs(name):
        yield Path(name)
        return
    if ".." in Path(name).parts:
        return
    top, _, rest = name.replace("\\", "/").partition("/")
    if top in ("site-packages", "dist-packages"):
        yield from (Path(folder) / rest for folder in (*_site_folders(), *sys.path))
        return
    if top == os.path.basename(_STDLIB[:-1]):
        yield Path(_STDLIB) / rest
    yield Path(name).absolute()
    if near is not None:
        yield from (folder / name for folder in near.absolute().parents[:3])
    yield from (Path(folder) / name for folder in sys.path if folder)


def _site_folders() -> list[str]:
    import sysconfig  # slow, and only for reading dumps

    folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return [*folders, *site.getsitepackages(), site.getusersitepackages()]


def _project() -> str:
    """Return the folder that the program runs in; "" where that is all of the disk, or gone."""
    try:
        here = os.getcwd()
    except OSError:
        return ""
    return "" if os.path.dirname(here) == here else here + os.sep


@functools.lru_cache(1)
def _person() -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return what matches the home, and the name in a path; None where there is no telling one."""
    home, ends = os.path.expanduser("~"), r"(?=$|[\\/\s\"'(),;:])"
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without an entry
        name = ""
    mine = len(home) > 1 and os.path.isabs(home)
    named = len(name) >= _SHORT and name != "root"
    return (
        re.compile(r"(?<![\w.~-])" + re.escape(home) + ends) if mine else None,
        re.compile(rf"(?<=[\\/]){re.escape(name)}{ends}|(?<=torchinductor_){re.escape(name)}\b")
        if named
        else None,
    )


def in_torch(file: str) -> bool:
    """Return whether a recorded file is torch's own, and so no line of the program."""
    return re.match(_TORCH, file) is not None
