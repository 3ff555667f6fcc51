"""The cells of IPython, if the program runs in it. Without it, cells are files like others."""

from __future__ import annotations

import re
import sys


def cell_of(file: str) -> int | None:
    """Return the number of the cell whose code has that file name, or None."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    label = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = label(file) if label is not None else None  # ("Cell", "In[3]")
    number = re.search(r"\d+", str(named[1])) if named else None
    return int(number[0]) if number else None
