"""The kernel's side of the JupyterLab extension.

It lists and deletes runs and reports, and opens explorers in tabs. The extension starts a kernel of
its own, calls `register` in it, and opens a comm to `RUNS` for its list and one to `EXPLORER` for
each tab. Listing runs imports neither torch nor a notebook package.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError, OptionError
from llmdebug_nb.core.options import RUNS_FOLDER
from llmdebug_nb.notebook import desk_wire as wire
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.store import catalog, own_file
from llmdebug_nb.store.progress import progress

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from llmdebug_nb.show.views import View

RUNS = "llmdebug_nb.runs"
EXPLORER = "llmdebug_nb.explorer"
_MADE_BY = b'<meta name="generator" content="llmdebug_nb">'  # in the head of our own pages
_HEAD = 1 << 12
# of the comparisons made in tabs: mine's folder -> the verdict, and golden's name
_verdicts: dict[Path, tuple[str, str]] = {}


class Comm(Protocol):
    """A channel to the page, as ipykernel makes it."""

    def on_msg(self, callback: Callable[[dict[str, Any]], None]) -> None: ...
    def send(self, data: dict[str, Any], *, buffers: list[memoryview]) -> None: ...


def register(shell: InteractiveShell) -> None:
    """Answer the comms that are opened from now on. Jupyter serves the kernel's folder."""
    served = Path.cwd()
    targets = shell.kernel.comm_manager
    targets.register_target(RUNS, lambda comm, _: Desk(served).attach(comm))
    targets.register_target(EXPLORER, lambda comm, _: Tab(served).attach(comm))


class _Answering:
    """Answers the messages of a comm: each op has a method of its name."""

    def __init__(self, served: Path) -> None:
        self.served = served

    def attach(self, comm: Comm) -> None:
        bridge = Bridge(self, wire.ANSWERS)

        def on_message(message: dict[str, Any]) -> None:
            content = message["content"]["data"]
            answer, buffers = (self.bridge_for(content) or bridge).answer(content)
            comm.send(answer, buffers=buffers)

        comm.on_msg(on_message)

    def bridge_for(self, content: object) -> Bridge | None:
        """Return another bridge to answer this message, if there is one."""
        return None


class Desk(_Answering):
    """The list of runs and reports."""

    def __init__(self, served: Path) -> None:
        super().__init__(served)
        self._are_reports: dict[tuple[Path, float], bool] = {}

    def runs(self, request: wire.RunsRequest) -> wire.Runs:
        name = os.environ.get("LLMDEBUG_RUNS") or request["name"] or RUNS_FOLDER
        asked = filter(self._holds, (self.served / folder for folder in request["folders"]))
        folders = [one for one in dict.fromkeys(map(Path.resolve, asked)) if os.path.isdir(one)]
        both = (home for folder in folders for home in (folder / name, folder))
        homes = dict.fromkeys(home.resolve() for home in both if self._holds(home))
        groups = [
            self._group("run", home, map(self._row, reversed(catalog.runs_in(home))))
            for home in homes
        ]
        groups += [self._group("report", folder, self._reports(folder)) for folder in folders]
        return {"folders": [group for group in groups if group["runs"]]}

    def delete(self, request: wire.DeleteRequest) -> wire.Deleted:
        path = Path(request["path"])
        if not path.is_absolute() or not self._holds(path):
            raise OptionError(f"{path} lies outside {self.served}; delete it yourself")
        if path.suffix == ".html" and self._is_report(path):
            path.unlink()
            return {"path": str(path)}
        from llmdebug_nb.app.runs import delete_run

        return {"path": str(delete_run(path))}

    def _holds(self, path: Path) -> bool:
        """Tell whether a path, links followed, is in the workspace or in the folder of all runs."""
        homes = (self.served, Path(os.environ.get("LLMDEBUG_RUNS") or self.served))
        try:
            real = path.resolve()
            return any(real.is_relative_to(home.resolve()) for home in homes)
        except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
            return False

    def _group(
        self, kind: wire.Kind, folder: Path, rows: Iterable[wire.RunRow | None]
    ) -> wire.RunsFolder:
        is_root = folder == self.served.resolve()
        name = "/" if is_root else place(folder, self.served) or str(folder)
        return {"kind": kind, "folder": name, "runs": [row for row in rows if row is not None]}

    def _reports(self, folder: Path) -> list[wire.RunRow]:
        rows: list[wire.RunRow] = []
        for file in folder.glob("*.html"):
            with contextlib.suppress(OSError):
                stat = file.lstat()
                if self._is_report(file):
                    rows.append(
                        {
                            "kind": "report",
                            "name": file.name,
                            "path": str(file),
                            "place": place(file, self.served),
                            "created": stat.st_mtime,
                            "bytes": stat.st_size,
                            "records": None,
                            "steps": None,
                            "state": "complete",
                            "problem": "",
                            "model": "",
                            "verdict": "",
                            "against": "",
                        }
                    )
        return sorted(rows, key=lambda row: -row["created"])

    def _is_report(self, file: Path) -> bool:
        """Return whether a file is one of our own pages; read each version of it once."""
        if not file.is_file() or file.is_symlink():
            return False
        version = file, file.stat().st_mtime
        if version not in self._are_reports:
            self._are_reports[version] = is_our_page(file)
        return self._are_reports[version]

    def _row(self, run: Path) -> wire.RunRow | None:
        """Return the row of a run; None if it is being deleted."""
        created, problem = 0.0, ""
        try:
            created = catalog.recorded_at(run)
        except CorruptDumpError as error:
            problem = str(error)
        if not run.is_dir():
            return None
        now = progress(run)
        verdict, against = _verdicts.get(run.resolve(), ("", ""))
        return {
            "kind": "run",
            "name": run.name,
            "path": str(run),
            "place": place(run, self.served),
            "created": created,
            "bytes": now.bytes,
            "records": now.records,
            "steps": now.steps,
            "state": "incomplete" if problem else now.state,
            "problem": problem,
            "model": now.model or "",
            "verdict": verdict,
            "against": against,
        }


class Tab(_Answering):
    """One explorer in a tab."""

    _bridge: Bridge | None = None

    def open(self, request: wire.OpenRequest) -> wire.Opened:
        from llmdebug_nb.app.compare import compare
        from llmdebug_nb.app.runs import open_run
        from llmdebug_nb.show.bundle import bundle
        from llmdebug_nb.show.run_view import RunView
        from llmdebug_nb.show.state import first_stop

        golden, mine = (
            str(self.served / path) if path else "" for path in (request["golden"], request["mine"])
        )
        if Path(golden).is_file() and not mine:
            return self._page(Path(golden))
        view: View
        if mine:
            report = compare(golden, mine, progress=False)
            _verdicts[Path(mine).resolve()] = report.verdict, report.golden.name
            view = report.view()
        else:
            view = RunView(open_run(golden))
        overview = view.overview({"op": "overview"})
        self._bridge = Bridge(view)
        traits = {
            "snapshot": overview,
            "position": first_stop(overview),
            "selected": overview["first_bad"],
            "path": "",
        }
        return {
            "title": overview["title"],
            "code": bundle(),
            "traits": traits,
            "page": "",
            "scripts": False,
        }

    def _page(self, file: Path) -> wire.Opened:
        """Return the page of a report."""
        from llmdebug_nb.show.saved_page import rebuild

        if not is_our_page(file):
            raise NotADumpError(f"{file.name} was not written by llmdebug")
        text = file.read_text(encoding="utf-8")
        rebuilt = rebuild(text)
        page = text if rebuilt is None else rebuilt
        return {
            "title": file.name,
            "code": "",
            "traits": {},
            "page": page,
            "scripts": rebuilt is not None,
        }

    def bridge_for(self, content: object) -> Bridge | None:
        opens = isinstance(content, dict) and content.get("op") == "open"
        return None if opens else self._bridge


def is_our_page(file: Path) -> bool:
    """Return whether `Report.to_html` or `export` wrote a page."""
    with own_file.open_file(file) as page:
        return _MADE_BY in page.read(_HEAD)


def place(path: Path, served: Path) -> str:
    """Return a path as in the file browser, "" if Jupyter does not serve it."""
    try:
        return path.relative_to(served.resolve()).as_posix()
    except ValueError:
        return ""
