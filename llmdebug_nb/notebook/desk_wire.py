"""The messages between JupyterLab's sidebar and tabs and their kernel.

`labextension/src/plugin/wire.ts` is generated from this. Requests and answers are numbered as in
`show.wire`; once a run is open, the explorer's own messages follow.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Kind = Literal["run", "report"]
State = Literal["complete", "recording", "incomplete"]


class RunRow(TypedDict):
    """A run on disk, or a report.

    ``place``: its path in the file browser, "" if Jupyter does not serve it. ``problem``: why it
    can't be opened, "" if its marker is sound. ``model``: the class of the recorded model, ""
    if it is not known. ``verdict``: of the last comparison of this run with the golden run
    ``against``; both are "" before one was made.
    """

    kind: Kind
    name: str
    path: str
    place: str
    created: float
    bytes: int
    records: int | None
    steps: int | None
    state: State
    problem: str
    model: str
    verdict: str
    against: str


class RunsFolder(TypedDict):
    """A folder of runs or of reports, newest first."""

    kind: Kind
    folder: str
    runs: list[RunRow]


class RunsRequest(TypedDict):
    """The runs in ``folders`` and in ``name`` below each of them, and the reports in these."""

    op: Literal["runs"]
    folders: list[str]
    name: str


class Runs(TypedDict):
    folders: list[RunsFolder]


class DeleteRequest(TypedDict):
    op: Literal["delete"]
    path: str


class Deleted(TypedDict):
    path: str


class OpenRequest(TypedDict):
    """A run or a report's file (``mine`` is ""), or two runs to compare."""

    op: Literal["open"]
    golden: str
    mine: str


class Opened(TypedDict):
    """The explorer's code and its first traits; for a file its ``page`` instead.

    ``scripts``: whether scripts run in the page; only our own do.
    """

    title: str
    code: str
    traits: dict[str, object]
    page: str
    scripts: bool


ANSWERS: dict[str, tuple[type, type]] = {
    "runs": (RunsRequest, Runs),
    "delete": (DeleteRequest, Deleted),
    "open": (OpenRequest, Opened),
}
