"""What a launched program finds in its environment, so that its Pythons begin with our hook."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmdebug_nb.app.launching.handover import VARIABLE, Handover
from llmdebug_nb.core.errors import OptionError

HOOK = Path(__file__).parent / "hook"
_NAMES = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 21)))
# goes before the python of that name further down the PATH, and puts back what a script took off PYTHONPATH
_SHIM = """#!/bin/sh
here={shims}
case ":$PYTHONPATH:" in
    *":{hook}:"*) ;;
    *) export PYTHONPATH="{hook}${{PYTHONPATH:+:$PYTHONPATH}}" ;;
esac
IFS=:
for place in $PATH; do
    [ "$place" = "$here" ] || [ ! -x "$place/{name}" ] || {{ unset IFS; exec "$place/{name}" "$@"; }}
done
echo "{name}: command not found" >&2
exit 127
"""


def environment(handover: Handover, given: Mapping[str, str], seed: int | None) -> dict[str, str]:
    """Return the environment of the program: ``given``, the hook first on PYTHONPATH, and stand-ins for python first on PATH."""
    shims = _shims(handover.folder / "bin", given.get("PATH", os.defpath))
    new = {
        VARIABLE: str(handover.folder),
        "PYTHONPATH": _before(str(HOOK), given.get("PYTHONPATH", "")),
        "PATH": _before(str(shims), given.get("PATH", os.defpath)),
    }
    return {**given, **new} if seed is None else {**given, **new, "PYTHONHASHSEED": str(seed)}


def _before(first: str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first


def _shims(folder: Path, path: str) -> Path:
    """Write a stand-in for each name of python that there is on the PATH."""
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
    """Return a path as it stands between double quotes in a script of the shell."""
    return "".join("\\" + c if c in '"$`\\' else c for c in str(path))


class PthFile:
    """A .pth file in the site-packages of the program's Python: it also works where PYTHONPATH is not looked at (``-E``, ``-I``).

    It does nothing in a process that was not launched by us, and is removed with `remove`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OptionError: there is no Python, or its folder can't be written to."""
        self._file = _site_packages(command) / f"llmdebug_launch_{os.getpid()}.pth"
        code = f"import os, runpy; os.environ.get({VARIABLE!r}) and runpy.run_path({str(HOOK / 'sitecustomize.py')!r})\n"
        try:
            self._file.write_text(code, encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"pth: can't write {self._file}: {error.strerror}; leave --pth out"
            ) from None

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)


def _site_packages(command: Sequence[str]) -> Path:
    """Return where the first Python of a command, else that of the PATH, looks for .pth files."""
    named = next((word for word in command if is_python(word)), "python")
    python = shutil.which(named) or shutil.which("python3")
    if python is None:
        raise OptionError(
            "pth: there is no python on the PATH to put a .pth file into; leave --pth out"
        )
    if Path(python).absolute() == Path(sys.executable).absolute():
        return Path(sysconfig.get_path("purelib"))
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=False)
    if asked.returncode != 0 or not Path(asked.stdout.strip()).is_dir():
        raise OptionError(
            f"pth: {python} does not say where its site-packages are; leave --pth out"
        )
    return Path(asked.stdout.strip())


def is_python(word: str) -> bool:
    """Tell whether a word of a command is a Python interpreter, with or without its path."""
    name = os.path.basename(word)
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.t")
