"""Building and loading what torch's own observer tells of operators (`observer.cpp`).

It is optional: without it, a dispatch mode sees them, with the same rows. It holds for one version
of torch, so no wheel has it: `build` compiles it against the installed one.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.tape import native
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.kernels import native as kernels

_SOURCE = Path(__file__).with_name("observer.cpp")
_HEADER = _SOURCE.with_name("notes.h")
# NDEBUG: as torch is built, since classes of its headers have more in them without it
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-shared")
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")


class Observer(Protocol):
    """Tells a tape of the operators of a thread.

    ``start``: from now on; what can't be noted is told to the methods ``find``, ``begin``, ``end``
    and ``end_noted`` of ``told``. Returns False if that can't be. ``stop``: no longer; returns
    whether it did. ``use``: what the tape offers.
    """

    def start(self, tape: object, told: object, /) -> bool: ...
    def stop(self, told: object, /) -> bool: ...
    def use(self, notes: object, /) -> None: ...


def place() -> Path:
    """Return where the library of this torch and this Python is, or would be.

    It lies with other extensions that are built against torch, see `torch.utils.cpp_extension`.

    Raises:
        CaptureError: nobody says where the home directory is.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        home = Path(folder) if folder else Path.home() / ".cache" / "torch_extensions"
    except RuntimeError as error:
        raise CaptureError(f"{error}: name a folder in TORCH_EXTENSIONS_DIR") from None
    versions = torch.__version__, str(torch.version.git_version), sys.version
    digest = hashlib.sha256("\0".join((*versions, sysconfig.get_platform())).encode())
    for path in (_SOURCE, _HEADER):
        digest.update(path.read_bytes())
    return home / "llmdebug_nb" / f"observer-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the library for the installed torch; return where it is.

    Raises:
        CaptureError: there is no tape that it could write on, or no compiler, or that failed, or
            the folder can't be written to.
    """
    from torch.utils import cpp_extension

    library = place()
    if native.tape(False) is None:
        raise CaptureError(f"the observer needs the tape in C: {kernels.why_not()}")
    compiler = shlex.split(os.environ.get("CXX", "")) or [*_compilers()]
    if not compiler:
        raise CaptureError("no C++ compiler: install g++ or clang++, or name one in CXX")
    fresh = library.with_suffix(f".{os.getpid()}")
    include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = [f"-isystem{path}" for path in include]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    where = [f"-L{path}" for path in cpp_extension.library_paths()]
    if sys.platform == "darwin":
        where += ["-undefined", "dynamic_lookup"]
    command = [*compiler, *_FLAGS, *flags, str(_SOURCE), "-o", str(fresh), *where, *_LIBRARIES]
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            fresh.chmod(0o700)
            fresh.replace(library)
    except OSError as error:
        raise CaptureError(f"the observer can't be compiled to {library.parent}: {error}") from None
    finally:
        fresh.unlink(missing_ok=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise CaptureError(
            f"{compiler[0]} can't compile the observer for torch {torch.__version__}:"
            f" {(lines or ['it says nothing'])[0]}"
        )
    _load.cache_clear()
    return library


def _compilers() -> list[str]:
    return [*filter(None, map(shutil.which, ("c++", "g++", "clang++")))][:1]


def observer() -> Observer | None:
    """Return the observer, or None if it was not built, or is none of this torch."""
    return _load()[0]


def why_not() -> str | None:
    """Return why there is no observer, None if there is one."""
    return _load()[1]


@cache
def _load() -> tuple[Observer | None, str | None]:
    """Return the observer, or None and the reason. The program waits for it: nothing is raised."""
    try:
        library, notes = place(), native.notes()
        if notes is None:
            return None, "there is no tape in C that it could write on"
        if not library.is_file():
            return None, "llmdebug build makes it for this PyTorch"
        if not _is_ours(library):
            return None, f"{library} can be written by others"
        spec = spec_from_loader("_observer", ExtensionFileLoader("_observer", str(library)))
        found = cast(Observer, module_from_spec(cast(ModuleSpec, spec)))
        found.use(notes)
        if _is_right(found):
            return found, None
        return None, f"{library.name} does not see what it should"
    except Exception as error:
        return None, f"it can't be used: {error}"


def _is_ours(library: Path) -> bool:
    """Tell whether nobody else can have written a library: to load it runs what is in it."""
    if os.name != "posix":
        return True
    states = [path.stat() for path in (library, library.parent)]
    return all(s.st_uid in (0, os.geteuid()) and not s.st_mode & 0o022 for s in states)


class _Told:
    """Counts what it is told of."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def find(self, name: str, overload: str) -> object:
        return torch_modes.operator(name, overload)

    def begin(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        self.calls.append((func, len(args), sorted(kwargs)))
        return "begun"

    def end(
        self, call: object, func: object, args: object, kwargs: object, result: object, raised: bool
    ) -> None:
        self.calls.append((call, isinstance(result, torch.Tensor), raised))


def _is_right(observer: Observer) -> bool:
    """Test that an operator is seen with its arguments, and what it calls is not."""
    told = _Told()

    def run() -> None:
        values = torch.from_numpy(np.ones(2, np.float32))
        if observer.start(object(), told):
            torch.sum(values, dim=0, dtype=torch.float64)
            observer.stop(told)

    alone = threading.Thread(target=run)  # no mode of the program sees what it does
    alone.start()
    alone.join()
    expected = torch.ops.aten.sum.dim_IntList, 2, ["dtype"]
    return told.calls == [expected, ("begun", True, False)]
