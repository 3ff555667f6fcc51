"""Write `src/widget/wire.ts` from `llmdebug_nb/show/wire.py`, and `src/plugin/wire.ts` from `llmdebug_nb/notebook/desk_wire.py`:
the two places that define messages.

python labextension/wire_types.py            # write them
python labextension/wire_types.py --check    # exit 1 when one is out of date
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import typing
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGETS = {
    "llmdebug_nb/show/wire.py": HERE / "src" / "widget" / "wire.ts",
    "llmdebug_nb/notebook/desk_wire.py": HERE / "src" / "plugin" / "wire.ts",
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


def load_wire(source: str) -> types.ModuleType:
    """Load a protocol by file, so that the package and what it imports need not be installed."""
    path = HERE.parent / source
    spec = importlib.util.spec_from_file_location(f"llmdebug_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # get_type_hints looks names up there
    spec.loader.exec_module(module)
    return module


def aliases_of(module: types.ModuleType) -> dict[object, str]:
    """Named unions and literals of the module, such as ``Num``."""
    return {
        value: name
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


def generate(source: str) -> str:
    """Return the whole of a wire.ts."""
    module = load_wire(source)
    aliases = aliases_of(module)
    blocks = [[f"export type {name} = {typescript(hint, {})};" for hint, name in aliases.items()]]
    blocks += [interface(cls, aliases) for cls in vars(module).values() if typing.is_typeddict(cls)]
    ops = [
        f"  {op}: {{ request: {request.__name__}; answer: {answer.__name__} }};"
        for op, (request, answer) in module.ANSWERS.items()
    ]
    blocks += [["/** What each op asks and answers. */", "export interface Ops {", *ops, "}"]]
    return (
        HEADER.format(source=source)
        + "\n"
        + "\n\n".join("\n".join(block) for block in blocks)
        + "\n"
    )


def main(args: list[str]) -> int:
    """Write the files, or with ``--check`` compare them; return the exit status."""
    if args not in ([], ["--check"]):
        print("usage: python labextension/wire_types.py [--check]", file=sys.stderr)
        return 2
    old = 0
    for source, target in TARGETS.items():
        text = generate(source)
        if not args:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != text:
            print(
                f"{target.name} of {source} is out of date: run `python labextension/wire_types.py`",
                file=sys.stderr,
            )
            old = 1
    return old


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
