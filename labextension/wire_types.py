"""Write the TypeScript of the messages between pages and the kernel.

`src/widget/wire.ts` is made from `llmdebug_nb/show/row_columns.py`, `wire.py`, `wire_findings.py`,
`wire_halts.py`, `wire_layers.py` and `wire_requests.py`, and `src/plugin/wire.ts` from
`llmdebug_nb/notebook/desk_wire.py`.

python labextension/wire_types.py            # write them
python labextension/wire_types.py --check    # exit 1 when one is out of date
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
import typing
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGETS = {
    (
        "llmdebug_nb.show.row_columns",
        "llmdebug_nb.show.wire",
        "llmdebug_nb.show.wire_findings",
        "llmdebug_nb.show.wire_halts",
        "llmdebug_nb.show.wire_layers",
        "llmdebug_nb.show.wire_requests",
    ): HERE / "src/widget/wire.ts",
    ("llmdebug_nb.notebook.desk_wire",): HERE / "src/plugin/wire.ts",
}
HEADER = """\
// Generated from {source} by `python labextension/wire_types.py`. Do not edit.
"""
SCALARS = {
    int: "number",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    dict[str, object]: "Record<string, unknown>",
}


def load(names: tuple[str, ...]) -> list[types.ModuleType]:
    """Import the modules of the messages from this checkout; they need no other package."""
    sys.path.insert(0, str(HERE.parent))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.pop(0)


def aliases_of(modules: list[types.ModuleType]) -> dict[object, str]:
    """Return the named unions and literals of the modules, such as ``Num``."""
    return {
        value: name
        for module in modules
        for name, value in vars(module).items()
        if typing.get_origin(value) in (typing.Union, types.UnionType, typing.Literal)
    }


def typescript(hint: object, aliases: dict[object, str]) -> str:
    """Return the TypeScript form of a type hint."""
    if typing.get_origin(hint) is not list and hint in aliases:
        return aliases[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        whole = aliases.get(typing.Union[tuple(rest)])  # noqa: UP007 - of any number
        parts = [whole] if whole else [typescript(arg, aliases) for arg in rest]
        names = list(dict.fromkeys(parts + ["null"] * (len(rest) < len(args))))
        return " | ".join(names)
    if origin is typing.Literal:
        return " | ".join(f"'{arg}'" for arg in args)
    if origin is list:
        item = typescript(args[0], aliases)
        return f"({item})[]" if " " in item else f"{item}[]"
    if isinstance(hint, type) and typing.is_typeddict(hint):
        return hint.__name__
    return SCALARS[hint]  # type: ignore[index]


def jsdoc(cls: type) -> list[str]:
    """Return the class's own docstring as a comment."""
    text = vars(cls).get("__doc__")
    lines = inspect.cleandoc(text).splitlines() if text else []
    if len(lines) < 2:
        return [f"/** {line} */" for line in lines]
    return ["/**", *(f" * {line}".rstrip() for line in lines), " */"]


def interface(cls: type, aliases: dict[object, str]) -> list[str]:
    """Return a TypedDict as an interface."""
    fields = typing.get_type_hints(cls)
    body = [f"  {name}: {typescript(hint, aliases)};" for name, hint in fields.items()]
    return [*jsdoc(cls), f"export interface {cls.__name__} {{", *body, "}"]


def constants(module: types.ModuleType, aliases: dict[object, str]) -> list[list[str]]:
    """Return the lists of a module that are declared with a type."""
    return [
        [
            f"export const {name}: {typescript(hint, aliases)} = [",
            *(f"  {json.dumps(one)}," for one in getattr(module, name)),
            "];",
        ]
        for name, hint in typing.get_type_hints(module).items()
        if typing.get_origin(hint) is list
    ]


def generate(names: tuple[str, ...]) -> str:
    """Return the text of a wire.ts."""
    modules = load(names)
    aliases = aliases_of(modules)
    blocks = [[f"export type {name} = {typescript(hint, {})};" for hint, name in aliases.items()]]
    for module in modules:
        classes = [one for one in vars(module).values() if typing.is_typeddict(one)]
        blocks += [interface(one, aliases) for one in classes if one.__module__ == module.__name__]
        blocks += constants(module, aliases)
    ops = [
        f"  {op}: {{ request: {request.__name__}; answer: {answer.__name__} }};"
        for op, (request, answer) in modules[-1].ANSWERS.items()
    ]
    blocks += [["/** What each op asks and answers. */", "export interface Ops {", *ops, "}"]]
    header = HEADER.format(source=" and ".join(map(path_of, names)))
    return header + "\n" + "\n\n".join("\n".join(block) for block in blocks) + "\n"


def path_of(name: str) -> str:
    """Return the path of a module."""
    return name.replace(".", "/") + ".py"


def main(args: list[str]) -> int:
    """Write the files, or with ``--check`` compare them; return the exit status."""
    if args not in ([], ["--check"]):
        print("usage: python labextension/wire_types.py [--check]", file=sys.stderr)
        return 2
    old = 0
    for names, target in TARGETS.items():
        text = generate(names)
        if not args:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != text:
            files = " and ".join(map(path_of, names))
            remedy = "run `python labextension/wire_types.py`"
            print(f"{target.name} of {files} is out of date: {remedy}", file=sys.stderr)
            old = 1
    return old


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
