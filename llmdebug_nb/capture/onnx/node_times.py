"""What the nodes of a session of ONNX Runtime took, from its own profile: of the session that runs in the program's place, node by node."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from llmdebug_nb.capture.onnx.run_recorder import FollowedSession
from llmdebug_nb.capture.timing import ort_profile
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.options import DumpOptions

_HOST = "host times are not taken of sessions of ONNX Runtime; profile='kernel' says how long each node ran"


class Host(Protocol):
    options: DumpOptions
    recorder: Any
    notes: list[str]


def write(host: Host, followed: FollowedSession) -> None:
    """Make the times of a session's nodes part of the dump, where they were asked for. Nothing that goes wrong is raised."""
    if "host" in host.options.profile and _HOST not in host.notes:
        host.notes.append(_HOST)
    file = followed.tap.profile() if followed.tap is not None else None
    if file is None:
        return
    try:
        found = ort_profile.launches(file)
    except CorruptDumpError as error:
        host.notes.append(f"no times of {followed.label}: {error}")
        return
    calls = _calls(followed)
    rows = []
    for run, row in found:
        if run < len(followed.ran):
            path, number = calls.get(row[0][1:], (row[0], row[1]))
            op = path.rpartition("/")[2]
            rows.append([None, followed.ran[run], path, number, row[2], op, *row[4:]])
    host.recorder.sink.table("launches", rows)


def _calls(followed: FollowedSession) -> dict[str, tuple[str, int]]:
    """Return path and number of each node's call by the node's name, as they are recorded."""
    counts: Counter[str] = Counter()
    found = {}
    for what, node in followed.plan:
        if what == "node":
            path = f"{followed.path(node.module)}/{node.op}"
            found[node.name] = (path, counts[path])
            counts[path] += 1
    return found
