"""The environment of a launched program, in which every Python starts with our hook."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmdebug_nb.app.launching.handover import VARIABLE, Handover
from llmdebug_nb.core.errors import OptionError

HOOK = Path(__file__).parent / "hook"
_NAMES = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 21)))
# a stand-in for python: it restores our hook in PYTHONPATH, then runs the real python
_SHIM = """#!/bin/sh
here={shims}
case ":$PYTHONPATH:" in
    *":{hook}:"*) ;;
    *) export PYTHONPATH="{hook}${{PYTHONPATH:+:$PYTHONPATH}}" ;;
esac
IFS=:
for place in $PATH; do
    [ "$place" = "$here" ] && continue
    [ -x "$place/{name}" ] && {{ unset IFS; exec "$place/{name}" "$@"; }}
done
echo "{name}: command not found" >&2
exit 127
"""


def environment(
    handover: Handover, inherited: Mapping[str, str], seed: int | None
) -> dict[str, str]:
    """Return the inherited environment with our hook first on PYTHONPATH.

    Stand-ins for python come first on PATH.
    """
    shims = _shims(handover.folder / "bin", inherited.get("PATH", os.defpath))
    new = {
        VARIABLE: str(handover.folder),
        "PYTHONPATH": _before(str(HOOK), inherited.get("PYTHONPATH", "")),
        "PATH": _before(str(shims), inherited.get("PATH", os.defpath)),
    }
    if seed is not None:
        new["PYTHONHASHSEED"] = str(seed)
    return {**inherited, **new}


def _before(first: str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first


def _shims(folder: Path, path: str) -> Path:
    """Write a stand-in for each name of python that is on the PATH."""
    folder.mkdir()
    for name in _NAMES:
        if shutil.which(name, path=path) is not None:
            shim = folder / name
            shim.write_text(
                _SHIM.format(shims=_quoted(folder), hook=_inside_quotes(HOOK), name=name),
                encoding="utf-8",
            )
            shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    return folder


def _quoted(path: Path) -> str:
    return '"' + _inside_quotes(path) + '"'


def _inside_quotes(path: Path) -> str:
    """Return a path as it is written between double quotes in a shell script."""
    return "".join("\\" + c if c in '"$`\\' else c for c in str(path))


class PthFile:
    """A .pth file in the site-packages of the program's Python.

    It runs the hook even if Python ignores PYTHONPATH (``-E``, ``-I``). In processes outside the
    launch it does nothing.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Write it. Raises OptionError: there is no Python, or its folder can't be written."""
        self._file = _site_packages(command) / f"llmdebug_launch_{os.getpid()}.pth"
        script = str(HOOK / "sitecustomize.py")
        code = f"import os, runpy; os.environ.get({VARIABLE!r}) and runpy.run_path({script!r})\n"
        try:
            self._file.write_text(code, encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"pth: can't write {self._file}: {error.strerror}; leave --pth out"
            ) from None

    def remove(self) -> None:
        """Delete the file."""
        self._file.unlink(missing_ok=True)


def _site_packages(command: Sequence[str]) -> Path:
    """Return the folder for .pth files of the first Python in a command, else of the PATH's."""
    import subprocess
    import sysconfig

    named = next((word for word in command if is_python(word)), "python")
    python = shutil.which(named) or shutil.which("python3")
    if python is None:
        raise OptionError(
            "pth: there is no python on the PATH to put a .pth file into; leave --pth out"
        )
    if Path(python).absolute() == Path(sys.executable).absolute():
        return Path(sysconfig.get_path("purelib"))
    script = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    answer = subprocess.run(script, capture_output=True, text=True, check=False)
    folder = Path(answer.stdout.strip())
    if answer.returncode != 0 or not folder.is_dir():
        raise OptionError(
            f"pth: {python} does not say where its site-packages are; leave --pth out"
        )
    return folder


def is_python(word: str) -> bool:
    """True if a word of a command names a Python interpreter, with or without its path."""
    name = os.path.basename(word)
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.t")
