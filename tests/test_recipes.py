"""The recipes in docs/recipes name files, and names in them, that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import llmdebug_nb as ld

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
HOMES = ("llmdebug_nb", "tests", "docs", "labextension/src")
_PATH = re.compile(r"(?:[\w.-]+/)*(?:[\w-]+\.(?:py|ts|md|toml)|Makefile)|(?:[\w-]+/)+")
_DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")


@cache
def _places() -> list[str]:
    found = [*ROOT.glob("*"), *ROOT.glob("labextension/*")]
    found += [path for home in HOMES for path in (ROOT / home).rglob("*")]
    return [path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in found]


def _named(path: str) -> list[str]:
    """Return the files and folders of the repository whose path ends with ``path``."""
    return [place for place in _places() if f"/{place}".endswith(f"/{path}")]


def _defined(file: Path) -> set[str]:
    """Return the names that a module defines at its top."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target)]
            found |= {name.id for name in names if isinstance(name, ast.Name)}
    return found


def _missing(quoted: str) -> str | None:
    """Return why what stands in backticks is not there; None if it is, or is no place."""
    for path in _PATH.findall(quoted):
        there = _named(path)
        if len(there) != 1 and path not in there:
            return f"{path} names {there or 'nothing'}"
    if not _DOTTED.fullmatch(quoted) or _PATH.fullmatch(quoted):
        return None
    module, _, name = quoted.rpartition(".")
    if module == "ld":
        return None if hasattr(ld, name) else f"{quoted} is no public name"
    files = [ROOT / place for place in _named(f"{module.replace('.', '/')}.py")]
    if any(name in _defined(file) for file in files):
        return None
    return f"{quoted}: no such name in {[str(file.relative_to(ROOT)) for file in files]}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_what_a_recipe_names_exists(recipe: Path) -> None:
    quoted = re.findall(r"`([^`\n]+)`", recipe.read_text(encoding="utf-8"))
    assert len(quoted) > 5
    assert [why for each in quoted if (why := _missing(each)) is not None] == []


def test_a_name_that_is_not_there_is_told() -> None:
    assert _missing("core/nowhere.py") is not None
    assert _missing("core/nowhere/") is not None
    assert _missing("distortion.nothing_of_the_kind") is not None
    assert _missing("python docs/nowhere.py") is not None
    assert _missing("ld.nothing") is not None
    assert _missing("__init__.py") is not None  # there are many


def test_every_recipe_fits_a_screen() -> None:
    assert {path.stem for path in RECIPES} == {"check", "column", "layout", "relation", "runtime"}
    for path in RECIPES:
        assert len(path.read_text(encoding="utf-8").split()) <= 250, path.stem
