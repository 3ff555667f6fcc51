"""Everything llmdebug_nb raises on purpose.

    LLMDebugError
    ├── OptionError          an argument, option or mapping that makes no sense (also a ValueError)
    ├── CaptureError         recording could not start or go on
    │   ├── EmptyDumpError   the block ran without any of the requested calls
    │   └── PeerError        the other process of a comparison in lockstep can't be talked to
    ├── StoreError           a dump could not be written or read
    │   ├── UnknownRunError  no run of that name or at that place (also a LookupError)
    │   ├── NotADumpError    the folder has none of the known layouts
    │   ├── CorruptDumpError bytes that contradict the format; names the file
    │   │   └── RemoteError  a remote store that fails, refuses, or gives fewer bytes than it has
    │   └── DumpWriteError   read-only place, full disk
    ├── TensorLookupError    a run has no such tensor, or not its values (also a LookupError)
    ├── CompareError         two runs that can't be compared
    ├── ClusterError         a Dask cluster that is not there, or whose workers can't do the work
    ├── ProofError           a recorded call can't be run again in the live model
    └── MissingPackageError  an optional package that is not installed (also an ImportError)

`show/` adds FrontEndMissingError (the explorer was not built) and FilterError (the typed filter is
invalid), `notebook/` adds BadRequestError (an invalid message from the page); the last two never
leave the explorer. Each message says in one line what was found, what was expected and what to do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from llmdebug_nb.core.printable import printable

_COMPARED = 500_000  # characters of known names that are compared with a wanted one: half a second
_LONGEST = 300  # characters of a runtime's message

# the folder of this package's own code: frames in it are never the user's
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class LLMDebugError(Exception):
    """Base of every error that llmdebug_nb raises on purpose. Its text may be printed anywhere."""

    def __str__(self) -> str:
        return printable(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return the message and the user's line, which IPython shows in place of a traceback."""
        line = ""
        trace = self.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if not file.startswith(PACKAGE):
                place = f"{os.path.basename(file)}, " if os.path.isfile(file) else ""
                line = f" ({place}line {trace.tb_lineno})"
            trace = trace.tb_next
        return [f"{type(self).__name__}: {self}{line}"]


class OptionError(LLMDebugError, ValueError):
    """An argument, option or mapping that makes no sense."""


class CaptureError(LLMDebugError):
    """Recording could not start or go on."""


class EmptyDumpError(CaptureError):
    """The block ran without any of the requested calls."""


class PeerError(CaptureError):
    """The other process of a comparison in lockstep is gone, is another one, or talks nonsense."""


class StoreError(LLMDebugError):
    """A dump could not be written or read."""


class UnknownRunError(StoreError, LookupError):
    """No run of that name or at that place."""


class NotADumpError(StoreError):
    """The folder has none of the known layouts."""


class CorruptDumpError(StoreError):
    """Bytes that contradict the format."""


class RemoteError(CorruptDumpError):
    """A remote store that fails, refuses, or gives fewer bytes than it has.

    To whoever reads a tensor, its values are as unreadable as damaged ones.
    """


class DumpWriteError(StoreError):
    """The place is read-only, or the disk is full."""


class TensorLookupError(LLMDebugError, LookupError):
    """A run has no such tensor, or not its values."""


class CompareError(LLMDebugError):
    """Two runs that can't be compared."""


class ClusterError(LLMDebugError):
    """A Dask cluster that is not there, or whose workers can't do the work."""


class ProofError(LLMDebugError):
    """A recorded call can't be run again in the live model, so nothing can be proven."""


class MissingPackageError(LLMDebugError, ImportError):
    """An optional package that is not installed."""


class UploadWarning(UserWarning):
    """Not all of a recording is in the store yet."""


def nearest(wanted: str, known: Iterable[str], limit: int = 3) -> str:
    """Return a clause such as ``; nearest: a, b`` for an error message, or an empty string.

    The root is left out, as its name is empty.
    """
    import difflib  # slow, and only for an error

    names = [name for name in dict.fromkeys(known) if name]
    lengths = itertools.accumulate(map(len, names))
    names = [name for name, read in zip(names, lengths, strict=True) if read < _COMPARED]
    close = difflib.get_close_matches(wanted, names, n=limit, cutoff=0.3) or names[:limit]
    return f"; nearest: {', '.join(close)}" if close else ""


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line; of a long one, the middle is left out.

    The messages of runtimes begin with what happened and end with the file that is concerned.
    """
    line = str(error).partition("\n")[0] or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"


@contextmanager
def saving(place: object, remedy: str = "") -> Iterator[None]:
    """Name the place of a result in an error of the file system. Raises DumpWriteError."""
    try:
        yield
    except OSError as error:
        raise DumpWriteError(f"can't write {place}: {error.strerror or error}{remedy}") from None
