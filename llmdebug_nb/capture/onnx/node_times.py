"""Times of a session's nodes, from the profile that ONNX Runtime writes of our session."""

from __future__ import annotations

from collections import Counter

from llmdebug_nb.capture.graphs.followed_graph import FollowedGraph
from llmdebug_nb.capture.graphs.graph import GraphNode
from llmdebug_nb.capture.onnx import ort_profile
from llmdebug_nb.capture.onnx.exposed_session import ExposedSession
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.paths import bounded

_NO_HOST_TIMES = (
    "host times are not taken of sessions of ONNX Runtime; "
    "profile='kernel' says how long each node ran"
)


def write(followed: FollowedGraph, options: DumpOptions, sink: Sink, notes: list[str]) -> None:
    """Write the times of a session's nodes, if requested. A profile that can't be read is noted."""
    if "host" in options.profile and _NO_HOST_TIMES not in notes:
        notes.append(_NO_HOST_TIMES)
    exposed = followed.exposed
    file = exposed.end_profile() if isinstance(exposed, ExposedSession) else None
    if file is None:
        return
    try:
        launches = ort_profile.launches(file)
    except CorruptDumpError as error:
        notes.append(f"no times of {followed.label}: {error}")
        return
    calls = _calls(followed)
    rows = []
    for run, (node, number, phase, _, *rest) in launches:
        if run < len(followed.ran):
            path, number = calls.get(node[1:], (node, number))
            op = path.rpartition("/")[2]  # a node's own name may have slashes, too
            rows.append([None, followed.ran[run], path, number, phase, op, *rest])
    sink.table("launches", rows)


def _calls(followed: FollowedGraph) -> dict[str, tuple[str, int]]:
    """Return name of a node -> path and number of its recorded call."""
    counts: Counter[str] = Counter()
    calls = {}
    for node in followed.plan:
        if isinstance(node, GraphNode):
            path = bounded(f"{followed.path(node.module)}/{node.op}")
            calls[node.name] = (path, counts[path])
            counts[path] += 1
    return calls
