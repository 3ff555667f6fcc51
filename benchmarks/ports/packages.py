"""Where the packages with ports lie, and how files of theirs are imported without the rest.

They want far more than a port needs (lightning, torchvision). So they are installed without what
they depend on, in a folder of their own, which `INSTALL` fills. ``LLMDEBUG_PORTS`` names another.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ports.entry import scratch
from ports.weights import several

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).parent / "requirements.txt"
INSTALL = f"pip install --no-deps --target .venv/ports -r {PINS.relative_to(ROOT)}"


def installed() -> Path:
    """Return the folder in which packages are installed for ports alone."""
    return Path(os.environ.get("LLMDEBUG_PORTS") or ROOT / ".venv" / "ports")


def folder(package: str) -> Path | None:
    """Return the folder of a package, which is not imported; None if it isn't installed."""
    own = installed() / package
    if own.is_dir():
        return own
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def missing(*packages: str) -> str | None:
    """Say why packages can't be used; None if they can."""
    absent = [package for package in packages if not folder(package)]
    return f"{' and '.join(absent)} not installed; {INSTALL}" if absent else None


def found(*packages: str) -> None:
    """Let whole packages be imported: those that a port's package needs."""
    for package in packages:
        where = folder(package)
        assert where is not None, missing(package)
        if str(where.parent) not in sys.path:
            sys.path.append(str(where.parent))


def file(package: str, name: str, **stubs: dict[str, Any]) -> Path:
    """Return a file of a package, and let its modules be imported without the package's own code.

    ``stubs``: names of modules of the package that stand for the real ones, with what is in them.
    """
    where = folder(package)
    assert where is not None, missing(package)
    if package not in sys.modules:
        shell = ModuleType(package)
        shell.__path__ = [str(where)]
        shell.__spec__ = ModuleSpec(package, None, is_package=True)  # others ask whether it's there
        sys.modules[package] = shell
        for module, names in stubs.items():
            stub = ModuleType(f"{package}.{module.replace('__', '.')}")
            vars(stub).update(names)
            sys.modules[stub.__name__] = stub
    return where / name


@contextmanager
def stand_ins(**modules: dict[str, Any]) -> Iterator[None]:
    """Let modules that aren't needed be imported meanwhile, with these names in them.

    A dot in a module's name is written as two underscores.
    """
    names = {name.replace("__", "."): has for name, has in modules.items()}
    new = [name for name in names if name not in sys.modules]
    for name in new:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names[name])
    try:
        yield
    finally:
        for name in new:
            del sys.modules[name]


@cache
def joined(package: str, *names: str, without: str = "", before: str = "") -> Path:
    """Write files of a package into one, and return it: a bug can be in any of them.

    ``names``: of the files, as `several` takes them.

    Imports from the package are left out, except from modules that `file` gave stubs for: what the
    port needs is in the files. So are functions and classes whose names begin with ``without``.
    ``before``: lines that stand for something else that is left out.
    """
    texts = ["from __future__ import annotations\n", before]
    files = several(" ".join(names))
    for name in files:
        text = file(package, name).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if _is_dropped(node, package, without):
                assert node.end_lineno is not None
                lines[node.lineno - 1 : node.end_lineno] = [""] * (
                    node.end_lineno - node.lineno + 1
                )
        texts.append("".join(lines))
    stem = Path(files[-1]).with_suffix("").as_posix().replace("/", "_")
    path = scratch() / f"joined_{package}_{stem}.py"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@cache
def _taken(package: str, names: tuple[tuple[str, tuple[str, ...]], ...], before: str) -> Path:
    texts = [before]
    for name, wanted in names:
        text = file(package, name).read_text(encoding="utf-8")
        nodes = {getattr(node, "name", ""): node for node in ast.parse(text).body}
        texts += [ast.get_source_segment(text, nodes[each]) or "" for each in wanted]
    path = scratch() / f"taken_{package}_{Path(names[-1][0]).stem}.py"
    path.write_text("\n\n\n".join(texts), encoding="utf-8")
    return path


def taken(package: str, names: dict[str, tuple[str, ...]], before: str) -> Path:
    """Write some functions and classes of a package into one file, and return it.

    ``names``: by file, in the order wanted. ``before``: lines that import what they need. What the
    package has besides is imported from it: no bug can be there.
    """
    return _taken(package, tuple(names.items()), before)


def _is_dropped(node: ast.stmt, package: str, without: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        own = bool(node.level) or module.partition(".")[0] in (package, "__future__")
        return (own and module not in sys.modules) or module == "__future__"
    is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
    return bool(without) and is_definition and node.name.startswith(without)
