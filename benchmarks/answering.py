"""What a comparison answers, without the figures that differ from CPU to CPU.

    python benchmarks/answering.py PROGRAM FILE

runs a program in the current folder, and writes what each of its comparisons answers to a file.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llmdebug_nb as ld

Answer = dict[str, Any]
SHOWN = 3  # findings


def answer(report: ld.Report) -> Answer:
    """Return what a report says. ``rules``: how often each named rule was what told, if any has."""
    coverage = report.coverage
    told = [getattr(each, "rule", None) for each in (*report.differences, *report.findings)]
    rules = Counter(str(rule) for rule in told if rule)
    found: Answer = {
        "verdict": report.verdict,
        "coverage": {
            "observables": f"{coverage.observables_matched} of {coverage.observables}",
            "values": f"{coverage.values_matched} of {coverage.values}",
            "rejoined": coverage.rejoined,
        },
        "rows": dict(Counter(each.verdict for each in report.differences)),
        "count": len(report.findings),
        "findings": [place(each) for each in report.findings[:SHOWN]],
    }
    return found | ({"rules": dict(rules)} if rules else {})


def place(finding: ld.Finding) -> Answer:
    """Return what a finding names: mine's line, else golden's, by its file without folders."""
    sides = [side for side in (finding.mine, finding.golden) if side is not None and side.file]
    line = f"{Path(sides[0].file or '').name}:{sides[0].line}" if sides else ""
    return {
        "path": finding.path,
        "op": finding.op,
        "step": finding.step,
        "cause": finding.cause,
        "relation": finding.relation,
        "line": line,
        "code": sides[0].code.strip() if sides else "",
    }


def failed(error: BaseException) -> Answer:
    return {"verdict": f"failed: {type(error).__name__}"}


@contextmanager
def collected() -> Iterator[list[Answer]]:
    """Collect what `ld.compare` answers meanwhile, also where it fails."""
    answers: list[Answer] = []
    compare = ld.compare

    def asked(*given: Any, **options: Any) -> ld.Report:
        try:
            report = compare(*given, **options)
        except Exception as error:
            answers.append(failed(error))
            raise
        answers.append(answer(report))
        return report

    ld.compare = asked
    try:
        yield answers
    finally:
        ld.compare = compare


def main(program: Path, target: Path) -> None:
    import torch

    torch.set_num_threads(1)
    sys.argv = [str(program)]
    sys.path[0] = str(program.parent)
    ended = "as it should"
    with collected() as answers:
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as error:
            ended = f"exit {error.code}"
        except Exception as error:
            ended = failed(error)["verdict"]
    found = {"ended": ended, "comparisons": answers}
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
