"""Rules for every module of the package, so that a stranger finds the way."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmdebug_nb as ld
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.causes.judge import RULES
from llmdebug_nb.comparison.rules import Rule

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llmdebug_nb"
MODULES = sorted(PACKAGE.rglob("*.py"))
BARE_ANY = 60  # so many parameters of private functions may be `Any`
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {_name(path) for path in MODULES}


def _functions(node: ast.AST, public: bool = True) -> Iterator[tuple[Function, bool]]:
    """Yield every function below a node, with whether a user of the module may call it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, public and not child.name.startswith("_"))
        elif isinstance(child, Function):
            dunder = child.name.startswith("__") and child.name.endswith("__")
            yield child, public and (dunder or not child.name.startswith("_"))
            yield from _functions(child, False)
        else:
            yield from _functions(child, public)


def _bare_any(function: Function) -> list[str]:
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    kinds = [(p.arg, p.annotation) for p in parameters]
    return [name for name, kind in kinds if isinstance(kind, ast.Name) and kind.id == "Any"]


def _parameters() -> Iterator[tuple[str, bool]]:
    for path in MODULES:
        for function, public in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _bare_any(function):
                yield f"{path.relative_to(ROOT)}:{function.lineno} {function.name}({name})", public


def test_no_public_function_takes_any():
    assert [where for where, public in _parameters() if public] == []


def test_few_private_functions_take_any():
    assert len(list(_parameters())) < BARE_ANY


def test_a_newcomer_sees_few_entries_and_few_names():
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 21, sorted(entries)
    assert len(ld.__all__) <= 33


def test_every_module_says_in_one_line_what_it_is_for():
    """`docs/file_list.py` prints these lines: the map of the house."""
    for path in MODULES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        empty = path.name == "__init__.py" and path.parent.parent != PACKAGE
        assert empty or text, path
        assert not text or text.splitlines()[0].endswith((".", "?", ":")), path


def _imports(path: Path) -> set[str]:
    """Return the imports within the package: at once, lazily, for types, or by a name in text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in NAMES else node.module for name in full}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)
    return (found & NAMES) - {_name(path)}


def test_modules_import_each_other_in_no_circle_not_even_lazily_or_for_types():
    left = {_name(path): _imports(path) for path in MODULES}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_sql_is_written_in_the_store_alone():
    outside = [path for path in MODULES if "store" not in path.parts]
    sql = re.compile(r"\bSELECT\b|\bORDER BY\b|\bGROUP BY\b")
    assert [path for path in outside if sql.search(path.read_text(encoding="utf-8"))] == []


OF_OTHER_TOOLS = {"DumpConfig", "PrecisionDebugger"}  # they take what msit's and msprobe's take


def test_a_constructor_takes_at_most_six_arguments():
    """A class that needs more has more than one job, or its arguments want to be one noun."""
    long = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in OF_OTHER_TOOLS:
                for made in node.body:
                    if isinstance(made, Function) and made.name == "__init__":
                        a = made.args
                        count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) - 1
                        if count > 6:
                            long[f"{path.relative_to(ROOT)}:{node.name}"] = count
    assert long == {}


JUDGING = [
    path
    for part in ("align", "comparison", "graph", "replay", "relation", "search", "causes")
    for path in (PACKAGE / part).glob("*.py")
]


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a module is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, Function):
            yield from (
                node for part in (child.args, *child.decorator_list) for node in ast.walk(part)
            )
        elif not isinstance(child, ast.Lambda):
            yield child
            yield from _at_import(child)


def _is_number(value: ast.expr | None) -> bool:
    """Tell whether an expression is a number, a tuple of numbers, or made from numbers alone."""
    if isinstance(value, ast.Tuple):
        return any(map(_is_number, value.elts))
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) or _is_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def test_the_numbers_that_decide_a_judgement_stand_in_one_file():
    for path in JUDGING:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                assert not _is_number(node.value), f"{path}:{node.lineno}: to core/constants.py"


def test_constants_are_read_when_they_are_used():
    for path in MODULES:
        for node in _at_import(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "constants", f"{path}:{node.lineno}: a copy of a constant"


def test_every_constant_is_used_and_has_a_derivation():
    lines = (PACKAGE / "core" / "constants.py").read_text(encoding="utf-8").splitlines()
    text = "".join(path.read_text(encoding="utf-8") for path in MODULES)
    used = set(re.findall(r"\bconstants\.([A-Z_]+)\b", text))
    defined = re.compile(r"[A-Z_, ]+ = ")
    for above, line in itertools.pairwise(lines):
        if defined.match(line):
            assert set(line.split(" = ")[0].split(", ")) <= used, line
            assert above.startswith("#") or defined.match(above), line


@pytest.mark.parametrize("members", [Rule, Reason], ids=lambda kind: kind.__name__)
def test_every_rule_and_every_reason_is_given_somewhere(members):
    text = "".join(path.read_text(encoding="utf-8") for path in MODULES)
    kind = members.__name__
    assert [m.name for m in members if not re.search(rf"\b{kind}\.{m.name}\b", text)] == []


def test_the_rules_that_find_a_cause_have_names_of_their_own_and_say_what_they_hold_for():
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert all(rule.__doc__ for rule in RULES)
