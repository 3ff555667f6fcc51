"""Mutated dumps, documents and messages go through everything that reads them.

`make fuzz` runs this for hours, and `test_fuzz.py` for a minute. A case is a target and a number,
which give the same mutation each time. What is allowed to happen: it works, or one of our own
errors is raised. What is not: another exception, a crash, `SLOW` seconds or `LARGE` bytes more than
a sound dump takes, and any file, process or socket outside the case's folder.

    python tests/fuzz.py --seconds 3600           from where the last one stopped
    python tests/fuzz.py --case index:17          one case, with its traceback
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz_corpus as corpus
import fuzz_mutations as mutate
import llmdebug_nb as ld
from llmdebug_nb.align import names
from llmdebug_nb.app import runs as app_runs
from llmdebug_nb.app.convert import convert
from llmdebug_nb.app.opcheck.check import OpCheck
from llmdebug_nb.app.opcheck.checking import How, check_all
from llmdebug_nb.app.opcheck.choosing import Choice, calls_of
from llmdebug_nb.app.opcheck.journal import Journal
from llmdebug_nb.capture import control_file
from llmdebug_nb.core.errors import PACKAGE
from llmdebug_nb.core.opchecks import METRICS, OpCheckResult
from llmdebug_nb.core.row_filter import RowFilter
from llmdebug_nb.notebook import desk, desk_wire
from llmdebug_nb.notebook.bridge import BadRequestError, check_request
from llmdebug_nb.show import wire_requests
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store import catalog, expected
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.checked import shape_of
from llmdebug_nb.store.topology import document

SLOW = 2.0  # CPU seconds
_sound = [0.0]  # CPU seconds that a sound dump takes
HANGS = 30  # seconds
LARGE = 500 << 20  # bytes
Case = Callable[[random.Random, Path], object]


class Escape(Exception):
    """Something outside the folder of the case was touched."""


# -- the guard ----------------------------------------------------------------------------------

_guarded: list[Path] = []  # the folder of the case that runs; nothing else may be written
_WRITES = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "shutil.rmtree")  # fmt: skip
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind",
          "ctypes.dlopen", "os.kill")  # fmt: skip


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _guarded:
        return
    if event == "open":
        path, _, flags = args
        flags = flags or 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if isinstance(path, (str, bytes)) and (writes or b"secret" in os.fsencode(path)):
            _check(event, path)
    elif event in _WRITES:
        removes = event in ("os.remove", "os.rmdir")  # `rmtree` names files in an open folder
        within = args[1] if removes and args[1] >= 0 else None
        for path in args[:2]:
            if isinstance(path, (str, bytes)):
                name = os.fsdecode(path)
                _check(event, f"/proc/self/fd/{within}/{name}" if within else name)
    elif event == "subprocess.Popen" and args[0] != sys.executable:
        raise Escape(f"{event} {args[1]!r:.200}")
    elif event in _NEVER and not (event == "os.kill" and args[1] == 0):  # 0 only asks
        raise Escape(f"{event} {args!r:.200}")


def _check(event: str, path: str | bytes) -> None:
    real = os.path.realpath(os.fsdecode(path))
    allowed = (str(_guarded[0]), "/dev/null")
    if not real.startswith(allowed) and "__pycache__" not in real:
        raise Escape(f"{event} {real:.200}")


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    _guarded.append(folder)
    try:
        yield
    finally:
        _guarded.pop()


# -- the tour -----------------------------------------------------------------------------------


def tour(path: Path, golden: Path, out: Path, rng: random.Random) -> None:
    """Do with a dump all that a user does. The first error of ours ends a stage, not the tour."""
    run = ld.open_run(path)
    stages: list[Callable[[], object]] = [
        run.info, lambda: repr(run), lambda: app_runs.describe_run(run), run.to_pandas, run.scalars,
        run.operators, run.ops, run.kernels, run.host, run.tiling, run.steps, run.ids,
        lambda: [run.stack(key) for key in list(run.operators()["path"])[:5]],
        lambda: [run.id_of(record.site) for record in run.records(n=20)],
        lambda: run.find("nowhere"), lambda: str(ld.topology(run)),
        lambda: ld.topology(run).to_json(), lambda: ld.timeline(run),
    ]  # fmt: skip
    stages += [lambda r=record: run.load(r) for record in _some(run)]
    stages += [lambda: _listed(path.parent), lambda: _views(RunView(run), rng, out)]
    if rng.random() < 0.4:  # takes most of the time
        stages.append(lambda: _compared(run, golden, rng, out))
    for stage in stages:
        with contextlib.suppress(ld.LLMDebugError):
            stage()


def _some(run: ld.Run) -> list[Any]:
    with contextlib.suppress(ld.LLMDebugError):
        return list(run.records(n=60))
    return []


def _compared(run: ld.Run, golden: Path, rng: random.Random, out: Path) -> None:
    report = ld.compare(golden, run, progress=False)
    for look in (
        lambda: str(report),
        lambda: report.to_html(out / "report.html"),
        lambda: _views(report.view(), rng, out),
    ):
        with contextlib.suppress(ld.LLMDebugError):
            look()


def _views(view: Any, rng: random.Random, out: Path) -> None:
    if rng.random() < 0.3:
        kind = rng.choice(("html", "svg"))
        with contextlib.suppress(ld.LLMDebugError):
            ld.export(view.run if isinstance(view, RunView) else view._report, out / f"p.{kind}")
    for op in rng.sample(sorted(wire_requests.ANSWERS), 8):
        with contextlib.suppress(ld.LLMDebugError):
            _ask(view, _request(rng, op))


def _listed(folder: Path) -> None:
    rows = desk.Desk(folder.parent).runs({"op": "runs", "folders": [""], "name": folder.name})
    json.dumps(rows, allow_nan=False)


def _request(rng: random.Random, op: str) -> dict[str, Any]:
    """Return a message that the wire types describe, with small numbers and texts."""
    kind = wire_requests.ANSWERS[op][0]
    return {"op": op} | {
        name: _value(rng, hint) for name, hint in _hints(kind).items() if name != "op"
    }


def _hints(kind: type) -> dict[str, Any]:
    from typing import get_type_hints

    return get_type_hints(kind)


def _value(rng: random.Random, hint: Any) -> Any:
    from typing import get_args

    if hint is int:
        return rng.choice((-1, 0, 0, 1, 2, 5, 20, 1 << 40, 1 << 62, 1 << 70))
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice(("", "0", "0.up", "nan>0", "abs>1", "id:0_1", "x y", "%_\\", "min<=1e9"))
    if hint in (list[int], list[float]):
        return [_value(rng, int) for _ in range(rng.randrange(4))]
    return rng.choice(get_args(hint)) if get_args(hint) else None


def _ask(view: Any, message: Any) -> None:
    """Answer a message as `Bridge.answer` does, which hides the errors that are not ours."""
    request = check_request(message)
    answer = getattr(view, request["op"])(request)
    parts = answer if isinstance(answer, tuple) else (answer, [])
    import msgspec

    msgspec.convert(parts[0], wire_requests.ANSWERS[request["op"]][1])
    json.dumps(parts[0], allow_nan=False).encode()


# -- targets ------------------------------------------------------------------------------------


class Corpus:
    """The sound dumps, and what light targets need of them in memory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        if not home.exists():
            corpus.make(home)
        self.topology = corpus.topology_text(home)
        (payload,) = (home / "operators").glob(f"rank*/{fmt.PAYLOAD}")
        self.payload = payload.read_bytes()
        self.sound_marker = json.loads((home / "golden" / fmt.MARKER).read_text("utf-8"))
        self.views = [
            RunView(ld.open_run(home / "operators")),
            ld.compare(home / "golden", home / "operators", progress=False).view(),
        ]

    def dump(self, kind: str) -> Case:
        def case(rng: random.Random, work: Path) -> None:
            place = work / "llmdebug_runs" / kind
            shutil.copytree(self.home / kind, place)
            for _ in range(rng.choice((1, 1, 2))):
                if kind in corpus.NATIVE and rng.random() < 0.7:
                    file = rng.choice(sorted(place.glob(f"rank*/{fmt.INDEX}")) or [None])
                    if file is not None:
                        mutate.index(rng, file)
                elif any(file.is_file() for file in place.rglob("*")):
                    mutate.folder(rng, place)
            with guarded(work):
                tour(place, self.home / "golden", work, rng)

        return case

    def index(self, rng: random.Random, work: Path) -> None:
        """Ask an index everything, without the work on its tensors."""
        place = shutil.copytree(self.home / rng.choice(corpus.NATIVE), work / "run")
        (file, *_) = place.glob(f"rank*/{fmt.INDEX}")
        mutate.index(rng, file)
        with guarded(work):
            run = ld.open_run(place)
            index, site = run.index, {"generation": 0, "step": 0, "rank": 0}
            for ask in (
                run.info, run.root_calls, lambda: run.nodes, lambda: list(run.records()),
                index.scalars, run.ids, lambda: index.enclosing_calls(**site), index.token_ids,
                index.count_by_step, index.count_by_path, index.forward_steps, index.first_bad,
                lambda: index.lost_reasons(3), lambda: index.matching(RowFilter(("a",), ("nan",))),
                lambda: [run.load(record) for record in run.records(n=9, role="output")],
                lambda: [index.frames(record.site.key) for record in run.records(n=9)],
            ):  # fmt: skip
                with contextlib.suppress(ld.LLMDebugError):
                    ask()

    def convert(self, rng: random.Random, work: Path) -> None:
        """Write compiled code in the formats of torchair."""
        place = self._mutated(rng, "compiled", work)
        with guarded(work):
            convert(place, work / "out", rng.choice(("fx", "fx-old", "ge")))

    def opcheck(self, rng: random.Random, work: Path) -> None:
        """Compute operators again, go on from a journal, and show the result."""
        place = self._mutated(
            rng, rng.choice(("operators", "operators", "compiled", "modules")), work
        )
        with guarded(work):
            names, rerun = rng.choice((None, None, "linear", "mm")), rng.random() < 0.3
            check = ld.opcheck(
                place,
                names=names,
                metrics=METRICS,
                rerun=rerun,
                output=work / "out",
                progress=False,
            )
            str(check), check._repr_html_()
            for call in check.result.calls[:2]:
                with contextlib.suppress(ld.LLMDebugError):
                    check.repro(call)

    def _mutated(self, rng: random.Random, kind: str, work: Path) -> Path:
        """Return a copy of a sound dump with its index or a frame of its tensors changed."""
        place = shutil.copytree(self.home / kind, work / "run")
        if rng.random() < 0.8:
            (file, *_) = place.glob(f"rank*/{fmt.INDEX}")
            mutate.index(rng, file)
        else:
            mutate.folder(rng, place)
        return place

    def journal(self, rng: random.Random, work: Path) -> None:
        """Go on from a journal of the same calls whose lines are changed."""
        run, calls, checks = self.checked
        with Journal(work, run, How(), calls) as journal:
            pass
        lines = [
            mutate.as_json(rng, json.loads(check.line())) if rng.random() < 0.3 else check.line()
            for check in rng.sample(checks, rng.randrange(1, len(checks)))
        ]
        text = mutate.text_of(rng, "\n".join(lines)) if rng.random() < 0.3 else "\n".join(lines)
        journal.path.write_bytes(f"{text}\n".encode("utf-8", "surrogatepass"))
        with guarded(work), Journal(work, run, How(), calls) as journal:
            found = tuple(journal.done.values())
            result = OpCheckResult("run", len(calls), found, {"metrics": METRICS})
            check = OpCheck(run, result)
            str(check), check._repr_html_(), check.to_csv(work / "c"), check.to_xlsx(work / "x")

    @functools.cached_property
    def checked(self) -> tuple[ld.Run, list[Any], list[Any]]:
        """A sound run, its calls and their checks."""
        run = ld.open_run(self.home / "operators")
        calls = calls_of(run, Choice())
        return run, calls, list(check_all(run, calls, How(trusted=True)))

    def frames(self, rng: random.Random, work: Path) -> None:
        file = work / "frames"
        file.write_bytes(mutate.frames(rng, self.payload))
        with open(file, "rb") as stream:
            list(fmt.scan_frames(stream, 0, file.stat().st_size))

    def document(self, rng: random.Random, work: Path) -> None:
        topology = document.read(mutate.as_json(rng, self.topology), "t.json")
        str(topology), topology.to_json(), topology.layers()

    def control(self, rng: random.Random, work: Path) -> None:
        kind = rng.choice((corpus.CONTROL, corpus.MSIT_CONTROL))
        control_file.read_settings(mutate.as_json(rng, kind)).selects("a.b", ("0",))

    def map(self, rng: random.Random, work: Path) -> None:
        file = work / "map.yaml"
        text = mutate.text_of(rng, mutate.text_of(rng, corpus.MAP))
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        names.read(file).kind("Linear")

    def marker(self, rng: random.Random, work: Path) -> None:
        text = mutate.as_json(rng, self.sound_marker)
        (work / fmt.MARKER).write_bytes(text.encode("utf-8", "surrogatepass"))
        catalog.read_marker(work)
        catalog.recorded_at(work)

    def expected(self, rng: random.Random, work: Path) -> None:
        file = work / "m.expected.json"
        text = mutate.as_json(rng, corpus.EXPECTED)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        expected._entries(file)

    def shape(self, rng: random.Random, work: Path) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            shape_of(mutate.as_json(rng, [2, 3, -1]))

    def request(self, rng: random.Random, work: Path) -> None:
        op = rng.choice(sorted(wire_requests.ANSWERS))
        message = mutate.document(rng, {"re": 1, **_request(rng, op)})
        check_request(message)

    def message(self, rng: random.Random, work: Path) -> None:
        """Answer valid messages with any numbers, and now and then invalid ones."""
        op = rng.choice(sorted(set(wire_requests.ANSWERS) - {"expect", "unexpect", "export"}))
        _ask(rng.choice(self.views), _request(rng, op))

    def desk(self, rng: random.Random, work: Path) -> None:
        shutil.copytree(self.home / "modules", work / "served/llmdebug_runs/r")
        shutil.copytree(self.home / "modules", work.parent / "secret-r", dirs_exist_ok=True)
        place = rng.choice((
            "served/llmdebug_runs/r", "served", "served/../../secret-r", "../secret-r", ".", "/",
        ))  # fmt: skip
        messages: tuple[dict[str, Any], ...] = (
            {"op": "runs", "folders": ["", "llmdebug_runs", ".."], "name": ""},
            {"op": "delete", "path": str(work / place)},
            {"op": "open", "golden": "llmdebug_runs/r", "mine": ""},
        )
        message = rng.choice(messages)
        if rng.random() < 0.5:
            message = mutate.document(rng, message)
        with guarded(work / "served"):
            request = check_request(message, desk_wire.ANSWERS)
            json.dumps(getattr(desk.Desk(work / "served"), request["op"], str)(request))

    @property
    def targets(self) -> dict[str, Case]:
        return {name: getattr(self, name) for name in LIGHT} | {
            name: self.dump(name) for name in (*corpus.NATIVE, *corpus.LAYOUTS)
        }


BATCHES = {
    "desk": 20,
    "index": 50,
    "message": 100,
    "marker": 100,
    "convert": 10,
    "opcheck": 3,
    "journal": 50,
}  # cases in a row
LIGHT = ("index", "frames", "document", "control", "map", "marker", "expected", "shape", "request",
         "message", "desk", "convert", "opcheck", "journal")  # fmt: skip
HEAVY = frozenset((*corpus.NATIVE, *corpus.LAYOUTS))


# -- one case, many cases -----------------------------------------------------------------------


def outcome_of(target: str, case: Case, seed: int, scratch: Path) -> tuple[str, str]:
    """Run a case; return its outcome, and the traceback of what must not happen."""
    work = scratch / "case"
    work.mkdir(parents=True)
    os.chdir(work)  # where an export goes
    rng = random.Random(f"{target}:{seed}")
    before, start = _memory(), time.process_time()
    outcome, trace = "ok", ""
    signal.alarm(HANGS)
    try:
        case(rng, work)
    except (ld.LLMDebugError, BadRequestError):
        outcome = "refused"
    except Exception as error:
        trace = traceback.format_exc()
        outcome = f"{type(error).__name__} at {_place(error)}"
    finally:
        signal.alarm(0)
        _guarded.clear()
        shutil.rmtree(work, ignore_errors=True)
    took = time.process_time() - start
    if took > SLOW + (_sound[0] if target in HEAVY else 0):
        outcome, trace = f"slow ({outcome})", f"{took:.1f} s\n{trace}"
    if _memory() - before > LARGE:
        outcome = f"large ({outcome})"
    return outcome, trace


def is_fine(outcome: str) -> bool:
    return outcome in ("ok", "refused")


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
    return f"{ours[-1].filename.removeprefix(PACKAGE)}:{ours[-1].lineno}"


def _hung(*_: object) -> None:
    raise TimeoutError("hangs")


@contextlib.contextmanager
def prepared(home: Path) -> Iterator[tuple[Corpus, Path]]:
    """Make the corpus below ``home``, install the guard, and yield both with a scratch folder."""
    warnings.simplefilter("ignore")
    for name in ("TMPDIR", "MPLCONFIGDIR", "LLMDEBUG_RUNS"):
        os.environ.pop(name, None)
    made = Corpus(home / "corpus")
    ld.compare(home / "corpus/golden", home / "corpus/modules", progress=False)  # imports, caches
    scratch = home / f"scratch{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "case").mkdir(parents=True)
    before = Path.cwd()
    for name in ("operators",):  # what is imported late is imported before the guard
        place = shutil.copytree(made.home / name, scratch / "case/llmdebug_runs/x")
        for seed in (0, 1, 2):
            start = time.process_time()
            tour(place, made.home / "golden", scratch, random.Random(seed))
            _sound[0] = max(_sound[0] if seed > 1 else 0.0, time.process_time() - start)
    shutil.rmtree(scratch / "case")
    if not getattr(sys, "_fuzz_watched", False):
        sys.addaudithook(_watch)
        sys._fuzz_watched = True  # type: ignore[attr-defined]
    tempfile.tempdir = str(scratch / "case")
    signal.signal(signal.SIGALRM, _hung)
    os.chdir(scratch)
    try:
        yield made, scratch
    finally:
        os.chdir(before)
        tempfile.tempdir = None
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--targets", default="", help="some of them, by commas")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--case", help="TARGET:SEED")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.case:
        target, _, seed = options.case.partition(":")
        with prepared(out) as (made, scratch):
            print(*outcome_of(target, made.targets[target], int(seed), scratch), sep="\n")
        return 0
    if options.worker:
        return _work(out, options.seconds, options.targets)
    # a crash ends the worker, not the fuzzing
    end = time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 0:
        more = ["--worker", "--seconds", str(left), "--out", str(out), "--targets", options.targets]
        ended = subprocess.run([sys.executable, __file__, *more], check=False).returncode
        state = _read(out)
        at = state["at"]
        if ended >= 0 or not at:
            break
        _note(out, state, at.partition(":")[0], int(at.partition(":")[2]), f"crash {-ended}", at)
    state = _read(out)
    for target, counts in sorted(state["counts"].items()):
        print(f"{target:12}", "  ".join(f"{outcome}: {n:,}" for outcome, n in counts.items()))
    bad = sum(n for counts in state["counts"].values() for o, n in counts.items() if not is_fine(o))
    total = sum(n for counts in state["counts"].values() for n in counts.values())
    print(f"{total:,} cases, {bad:,} of them findings, in {out}")
    return int(bad > 0 or total == 0)


def _read(out: Path) -> dict[str, Any]:
    file = out / "state.json"
    return json.loads(file.read_text()) if file.exists() else {"next": {}, "counts": {}, "at": ""}


def _note(
    out: Path, state: dict[str, Any], target: str, seed: int, outcome: str, trace: str
) -> None:
    counts = state["counts"].setdefault(target, {})
    counts[outcome] = counts.get(outcome, 0) + 1
    state["next"][target] = seed + 1
    if not is_fine(outcome) and counts[outcome] <= 5:
        (out / f"{target}-{seed}.txt").write_text(f"{outcome}\n{trace}", "utf-8", "replace")
    if target in HEAVY or seed % 1000 == 0 or not is_fine(outcome):
        (out / "state.json").write_text(json.dumps(state))


def _work(out: Path, seconds: float, only: str) -> int:
    with prepared(out) as (made, scratch):
        end = time.monotonic() + seconds
        targets = {n: c for n, c in made.targets.items() if not only or n in only.split(",")}
        state = _read(out)
        while time.monotonic() < end:
            for target, case in targets.items():
                for _ in range(BATCHES.get(target, 1 if target in HEAVY else 300)):
                    seed = state["next"].get(target, 0)
                    if target in HEAVY:
                        state["at"] = f"{target}:{seed}"
                        (out / "state.json").write_text(json.dumps(state))
                    found = outcome_of(target, case, seed, scratch)
                    _note(out, state, target, seed, *found)
        (out / "state.json").write_text(json.dumps(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
