"""Opening runs in remote stores: each is copied once, as long as the store has the same run."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

from llmdebug_nb.core.errors import UnknownRunError
from llmdebug_nb.store import reader
from llmdebug_nb.store.remote import mirror, stores
from llmdebug_nb.store.run import Run

_known: dict[str, mirror.Mirror] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def opened(url: str, scratch: Path) -> Run:
    """Open a run in a remote store. ``scratch``: a folder for copies of indexes.

    Raises:
        UnknownRunError, NotADumpError, CorruptDumpError: as `reader.open_run`.
        RemoteError: the store fails or refuses.
        MissingPackageError, OptionError: no package for such a store; no URL of one.
    """
    place = mirror.find(stores.place(url))
    with _lock:
        try:
            found = _known.get(place.url)
            if found is None or not found.is_current():
                found = mirror.Mirror(place, scratch / str(next(_numbers)) / _folder_name(place))
                _known[place.url] = found
        except FileNotFoundError:
            raise UnknownRunError(f"no run at {place.url}: it was deleted meanwhile") from None
    return reader.native(found.folder)


def _folder_name(place: stores.Place) -> str:
    """Return the name of a run's folder, which is also a name for a file of this machine."""
    name = place.name
    return name if Path(name).name == name and name not in ("", ".", "..") else "run"
