"""Score comparisons of vLLM with Hugging Face: correct pairs, and pairs with one bug.

    python benchmarks/engines/score.py [--families llama,qwen2] [--precisions fp32,bf16/bf16]
        [--cases batched,wrong_eps] [--set known] [--json FILE]

It runs in the environment that ``make test-engines`` makes. Mine is a vLLM engine in this process,
which serves texts alone, batched, in chunks, from its prefix cache and with preemption. Golden is
the model of Hugging Face, given each prompt with its output. Both are recorded with weights and
compared by `ld.compare` with its defaults. What is right is told in ``ports/score.py``.

A golden module output is matched if it has a partner in mine, or is written otherwise there and
equal in effect. Of ``--set unseen`` only the counts are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from ports.score import NEAR_TIE, NONDETERMINISTIC, RIGHT, Answer, named
from transformers import PreTrainedModel
from zoo.entry import PRECISIONS

import llmdebug_nb as ld
from engines import families, serving
from engines.bugs import PLANTED, Planted
from engines.serving import WAYS
from llmdebug_nb.core.records import Site

SETS = {"known": PLANTED[::2], "unseen": PLANTED[1::2], "all": PLANTED}


@dataclass
class Mark:
    """How a case went. ``grade``: of a bug. ``matched``, ``outputs``: of golden's modules.

    ``tied``: golden ties two experts or tokens, by its own rounding.
    """

    family: str
    precision: str
    case: str
    verdict: str = "failed"
    tied: bool = False
    matched: int = 0
    outputs: int = 0
    findings: int = 0
    grade: str = ""
    blamed: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Tell whether a correct pair was judged right."""
        fine = self.verdict in RIGHT or (self.tied and self.verdict == NONDETERMINISTIC)
        return fine and not self.findings


def record(
    origin: PreTrainedModel, precision: str, way: serving.Way, planted: Planted | None, folder: Path
) -> tuple[ld.Run, ld.Run]:
    """Return the runs of golden and of mine."""
    state = {name: values.clone() for name, values in origin.state_dict().items()}
    if "lm_head.weight" in state and origin.config.tie_word_embeddings:
        del state["lm_head.weight"]
    bug = planted.bug if planted else None
    if bug and bug.convert:
        bug.convert(state)
    llm = serving.engine(origin, state, PRECISIONS[precision][1], way, bug.settings if bug else {})
    texts = serving.prompts(way)
    if way.again:
        serving.serve(llm, texts, 2)
    options = {"path": folder, "tokens": "all", "weights": True}
    planting = planted.engine(llm) if planted else None
    if planting:
        planting.__enter__()
    with ld.dump(llm, name="mine", **options) as mine:
        served = serving.serve(llm, texts, way.output)
    serving.close(llm)
    model = families.cast(origin, precision)
    with ld.dump(model, name="golden", **options) as golden, torch.no_grad():
        for text in served:
            model(torch.tensor([text[:-1]]))
    return golden, mine


def mark(family: str, precision: str, case: str) -> Mark:
    """Record and compare one pair."""
    planted = next((each for each in PLANTED if each.bug.name == case), None)
    way = WAYS[planted.way if planted else case]
    result = Mark(family, precision, case)
    try:
        with tempfile.TemporaryDirectory() as folder:
            origin = families.model(family)
            runs = record(origin, precision, way, planted, Path(folder))
            judge(result, ld.compare(*runs, progress=False), planted)
    except Exception:
        result.blamed = [traceback.format_exc(limit=-3)]
    if planted and not result.grade:
        result.grade = "wrong"
    return result


def judge(result: Mark, report: ld.Report, planted: Planted | None) -> None:
    """Fill in what a report says."""
    causes = [each.cause for each in report.findings]
    result.verdict, result.tied = report.verdict, NEAR_TIE in causes
    seen = [
        named(each) for each in report.findings if each.cause not in (NONDETERMINISTIC, NEAR_TIE)
    ]
    result.findings, result.blamed = len(seen), [each.text for each in seen[:3]]
    found: dict[Site, bool] = {}
    for each in report.differences:
        at = each.pair.golden.site if each.pair.golden else None
        if at is not None and at.role == "output" and "/" not in at.path:
            has_partner = each.verdict != "unmatched" or not each.is_mismatch
            found[at] = found.get(at, False) or has_partner
    result.matched, result.outputs = sum(found.values()), len(found)
    result.alone = sorted(
        {f"{at.path} {at.slot}" for at, is_found in found.items() if not is_found}
    )
    if planted:
        result.grade = Answer(planted.bug, "", frozenset()).grade(seen, "modules")


# -- the table -----------------------------------------------------------------------------------


def table(marks: Sequence[Mark]) -> str:
    """Return a row for each model and precision, as Markdown."""
    head = ["model", "precision", "correct right", "verdicts", "outputs matched"]
    head += ["first finding right", "exact"]
    rows = [head, ["---"] * len(head)]
    for key in dict.fromkeys((m.family, m.precision) for m in marks):
        some = [m for m in marks if (m.family, m.precision) == key]
        right, bugs = [m for m in some if not m.grade], [m for m in some if m.grade]
        matched, outputs = sum(m.matched for m in right), sum(m.outputs for m in right)
        share = f"{100 * matched / outputs:.0f} %" if outputs else ""
        good = sum(m.grade in ("exact", "module") for m in bugs)
        exact = sum(m.grade == "exact" for m in bugs)
        verdicts = ", ".join(f"`{each}`" for each in sorted({m.verdict for m in right}))
        counts = [f"{sum(m.right for m in right)} of {len(right)}", verdicts, share]
        rows.append([*key, *counts, f"{good} of {len(bugs)}", str(exact)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def misses(marks: Sequence[Mark]) -> str:
    """Return each false alarm and each bug that is not exact, but for the unseen ones."""
    unseen = {each.bug.name for each in SETS["unseen"]}
    return "\n".join(
        f"{m.grade or 'alarm'}: {m.family}/{m.case} {m.precision}: {m.verdict} {m.blamed[:2]}"
        for m in marks
        if not m.right and m.grade != "exact" and m.case not in unseen
    )


# -- the command ---------------------------------------------------------------------------------


def cases(given: argparse.Namespace, family: str) -> Iterator[str]:
    state = families.model(family).state_dict()
    if families.FAMILIES[family][1].get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    fitting = [each.bug.name for each in SETS[given.set] if each.fits(state)]
    for name in [*WAYS, *fitting]:
        if not given.cases or name in given.cases:
            yield name


def run(given: argparse.Namespace) -> list[Mark]:
    """Run each model and precision in a process of its own: engines leave memory behind."""
    marks = []
    for family in given.families:
        for precision in given.precisions:
            todo = ",".join(cases(given, family))
            command = [sys.executable, __file__, "--one", family, precision, todo]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            told = [line for line in done.stdout.splitlines() if line.startswith("MARK ")]
            marks += [Mark(**json.loads(line[5:])) for line in told]
            if len(told) != todo.count(",") + 1:
                print(f"{family} {precision}: {done.stderr[-2000:]}", file=sys.stderr)
            print(f"{family} {precision}: {len(told)} cases", file=sys.stderr, flush=True)
    return marks


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        family, precision, names = sys.argv[2:]
        for name in names.split(","):
            print("MARK", json.dumps(asdict(mark(family, precision, name))), flush=True)
        return

    def several(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=several, default=list(families.FAMILIES))
    parser.add_argument("--precisions", type=several, default=["fp32", "bf16/bf16"])
    parser.add_argument("--cases", type=several, default=[])
    parser.add_argument("--set", choices=SETS, default="all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    marks = run(given)
    print(f"{table(marks)}\n\n{misses(marks)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(m) for m in marks], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
