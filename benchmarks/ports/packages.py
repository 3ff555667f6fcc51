"""Where the packages with ports lie, and how one file of theirs is imported without the rest.

They want far more than a port needs (lightning, torchvision). So they are installed without what
they depend on, in a folder of their own:

    pip install --no-deps --target .venv/ports litgpt==0.5.13 open_clip_torch==3.3.0

``LLMDEBUG_PORTS`` names another folder.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "pip install --no-deps --target .venv/ports litgpt==0.5.13 open_clip_torch==3.3.0"


def folder(package: str) -> Path | None:
    """Return the folder of a package, which is not imported; None if it isn't installed."""
    given = os.environ.get("LLMDEBUG_PORTS") or ROOT / ".venv" / "ports"
    own = Path(given, package)
    if own.is_dir():
        return own
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def missing(package: str) -> str | None:
    """Say why a package can't be used; None if it can."""
    return None if folder(package) else f"{package} is not installed; {INSTALL}"


def file(package: str, name: str, **stubs: dict[str, Any]) -> Path:
    """Return a file of a package, and let its modules be imported without the package's own code.

    ``stubs``: names of modules of the package that stand for the real ones, with what is in them.
    """
    where = folder(package)
    assert where is not None, missing(package)
    if package not in sys.modules:
        shell = ModuleType(package)
        shell.__path__ = [str(where)]
        sys.modules[package] = shell
        for module, names in stubs.items():
            stub = ModuleType(f"{package}.{module.replace('__', '.')}")
            vars(stub).update(names)
            sys.modules[stub.__name__] = stub
    return where / name
