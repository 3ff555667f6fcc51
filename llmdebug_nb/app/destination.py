"""Where a recording goes: a folder of this machine, or a store that it is uploaded to."""

from __future__ import annotations

from pathlib import Path

from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.urls import is_url, without_secrets

recorded: dict[str, Path] = {}  # folders of the runs of this process, by name


def url_of(options: DumpOptions) -> str | None:
    """Return the URL that a recording is to be uploaded to; None: it stays on this machine.

    Raises:
        OptionError: fsspec knows no such store, or the recording forgets what it uploaded.
        MissingPackageError: the package for such a store is not installed.
    """
    url = options.path
    if not isinstance(url, str) or not is_url(url):
        return None
    if options.last is not None:
        raise OptionError(
            f"last={options.last} and path={without_secrets(url)!r} exclude each other:"
            " steps that are dropped later would be uploaded first. Record without path, then:"
            f" llmdebug copy {options.name} {without_secrets(url)}"
        )
    from llmdebug_nb.store.remote import stores

    stores.check(url)
    return url
