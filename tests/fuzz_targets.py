"""What is fuzzed: the sound dumps, and a case for each thing that reads one or an answer."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_corpus as corpus
import fuzz_mutations as mutate
import llmdebug_nb as ld
from fuzz_guard import guarded
from fuzz_tour import ask, request_of, tour
from llmdebug_nb.align import names
from llmdebug_nb.app.convert import convert
from llmdebug_nb.app.opcheck.check import OpCheck
from llmdebug_nb.app.opcheck.checking import How, check_all
from llmdebug_nb.app.opcheck.choosing import Choice, calls_of
from llmdebug_nb.app.opcheck.journal import Journal
from llmdebug_nb.capture import control_file
from llmdebug_nb.notebook import desk, desk_wire
from llmdebug_nb.notebook.bridge import check_request
from llmdebug_nb.replay.checks import METRICS, OpCheckResult
from llmdebug_nb.show import wire_requests
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store import catalog, expected
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.checked import shape_of
from llmdebug_nb.store.row_filter import RowFilter
from llmdebug_nb.store.topology import document

Case = Callable[[random.Random, Path], object]


@dataclass(frozen=True)
class MutatedDump:
    """A tour of a sound dump of ``home`` with some of its bytes changed."""

    home: Path
    kind: str

    def __call__(self, rng: random.Random, work: Path) -> None:
        touring, place = self._begun(rng, work)
        for _ in range(rng.choice((1, 1, 2))):
            if self.kind in corpus.NATIVE and rng.random() < 0.7:
                file = rng.choice(sorted(place.glob(f"rank*/{fmt.INDEX}")) or [None])
                if file is not None:
                    mutate.index(rng, file)
            elif any(file.is_file() for file in place.rglob("*")):
                mutate.folder(rng, place)
        with guarded(work):
            tour(place, self.home / "golden", work, touring)

    def sound(self, rng: random.Random, work: Path) -> None:
        """Make the same tour of the dump as it is."""
        touring, place = self._begun(rng, work)
        tour(place, self.home / "golden", work, touring)

    def _begun(self, rng: random.Random, work: Path) -> tuple[random.Random, Path]:
        """Return what the tour's choices come from, and a copy of the dump."""
        place = work / "llmdebug_runs" / self.kind
        return random.Random(rng.random()), shutil.copytree(self.home / self.kind, place)


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

    def index(self, rng: random.Random, work: Path) -> None:
        """Ask an index everything, without the work on its tensors."""
        place = shutil.copytree(self.home / rng.choice(corpus.NATIVE), work / "run")
        (file, *_) = place.glob(f"rank*/{fmt.INDEX}")
        mutate.index(rng, file)
        with guarded(work):
            run = ld.open_run(place)
            index, site = run.index, {"generation": 0, "step": 0, "rank": 0}
            for question in (
                run.info, run.root_calls, lambda: run.nodes, lambda: list(run.records()),
                index.scalars, run.ids, lambda: index.enclosing_calls(**site), index.token_ids,
                index.count_by_step, index.count_by_path, index.forward_steps, index.first_bad,
                lambda: index.lost_reasons(3), lambda: index.matching(RowFilter(("a",), ("nan",))),
                lambda: [run.load(record) for record in run.records(n=9, role="output")],
                lambda: [index.frames(record.site.key) for record in run.records(n=9)],
            ):  # fmt: skip
                with contextlib.suppress(ld.LLMDebugError):
                    question()

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
        message = mutate.document(rng, {"re": 1, **request_of(rng, op)})
        check_request(message)

    def message(self, rng: random.Random, work: Path) -> None:
        """Answer valid messages with any numbers, and now and then invalid ones."""
        op = rng.choice(sorted(set(wire_requests.ANSWERS) - {"expect", "unexpect", "export"}))
        ask(rng.choice(self.views), request_of(rng, op))

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
            name: MutatedDump(self.home, name) for name in (*corpus.NATIVE, *corpus.LAYOUTS)
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
