"""Print the list of files, each with the first line that it says of itself.

python docs/file_list.py | less
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmdebug_nb"
_COMMENT = re.compile(r"/\*\s*(.+?)\s*(?:\*/|\n)")


def summary(path: Path) -> str:
    """Return the first line of a module's docstring, or of a C file's first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comment = _COMMENT.search(text)
    return comment.group(1) if comment else ""


def listing() -> str:
    """Return the whole list, one section for each folder of the package."""
    paths = sorted(
        (p for p in PACKAGE.rglob("*") if p.suffix in {".py", ".c", ".cpp", ".h"}),
        key=lambda p: (p.parent.relative_to(PACKAGE).parts, p.name),
    )
    sections = []
    for folder, files in itertools.groupby(paths, key=lambda p: p.parent):
        said = {path.name: summary(path) for path in files}
        opening = said.pop("__init__.py", "")
        lines = [f"## {folder.relative_to(ROOT).as_posix()}", opening]
        if said:
            lines.append("\n".join(f"* `{name}`: {text}" for name, text in said.items()))
        sections.append("\n\n".join(filter(None, lines)))
    return "\n\n".join(sections)


if __name__ == "__main__":
    print(listing())
