"""URLs of remote stores, and the paths of this machine, which are none."""

from __future__ import annotations

import os
import re
from pathlib import Path

from llmdebug_nb.core.errors import OptionError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_SECRET = re.compile(r"(?<=//)[^/@]*@")


def is_url(where: object) -> bool:
    """Tell whether a text names a place in a remote store, such as ``s3://bucket/runs``."""
    return isinstance(where, str) and _URL.match(where) is not None


def without_secrets(url: str) -> str:
    """Return a URL without user and password."""
    return _SECRET.sub("", url)


def on_this_machine(where: str | os.PathLike[str]) -> Path:
    """Return the path that a result is written to. Raises OptionError: it is in a remote store."""
    if is_url(where):
        raise OptionError(
            f"{without_secrets(os.fspath(where))} is in a remote store: only runs are recorded and"
            " copied there; name a place on this machine for results"
        )
    return Path(where)
