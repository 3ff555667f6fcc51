"""Score comparisons of llama.cpp with transformers: right files, and files with one bug each.

    PYTHONPATH=. .venv/llamacpp/bin/python benchmarks/engines/llamacpp.py [f32 f16+flash q8_0]
        [--kinds llama,gemma2] [--cases ubatch,…] [--set known] [--json FILE]

It runs in the environment that ``make test-engines`` makes. The files are of small random models.
A right one is recorded as it computes a text at once, in parts (``n_ubatch``), several texts in a
batch, and token by token, as golden generates. What is right is told in ``ports/score.py``; a bug
is right if the first finding is exact or names the module. A golden module output is matched if it
has a partner in mine. Flash attention is on where the precision has ``+flash``; the cache is in f32
where it is off. Of ``--set unseen`` only the counts are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import llama_cpp
import torch
from transformers import PreTrainedModel

import llmdebug_nb as ld
from engines.gguf_bugs import SETS, Planted, made
from engines.score import Mark, judge, misses, table

TEXT = [(7 * at * at + 11 * at + 10) % 500 for at in range(28)]
SHORT = [[token * (k + 3) % 500 for token in range(10, 10 + n)] for k, n in enumerate((5, 23, 9))]
PROMPT = 24  # tokens of the text that golden is given before it generates
OPTIONS: dict[str, Any] = {"tokens": "all"}


# -- both programs -------------------------------------------------------------------------------


def at_once(source: PreTrainedModel, texts: Sequence[list[int]]) -> None:
    for text in texts:
        source(torch.tensor([text]))


def generated(source: PreTrainedModel, texts: Sequence[list[int]]) -> None:
    """Generate the tokens of the texts behind their prompts."""
    for text in texts:
        forced = {len(text[:n]): text[n] for n in range(PROMPT, len(text))}
        source.generate(
            torch.tensor([text[:PROMPT]]),
            max_new_tokens=len(text) - PROMPT,
            do_sample=False,
            prefix_allowed_tokens_fn=lambda _, ids, forced=forced: [forced[len(ids)]],
        )


def evaluated(llama: llama_cpp.Llama, texts: Sequence[list[int]]) -> None:
    for text in texts:
        llama.reset()
        llama.eval(text)


def one_by_one(llama: llama_cpp.Llama, texts: Sequence[list[int]]) -> None:
    """Evaluate the prompt of each text, then its tokens but the last, which nobody computes."""
    for text in texts:
        llama.reset()
        llama.eval(text[:PROMPT])
        for token in text[PROMPT:-1]:
            llama.eval([token])


def in_a_batch(llama: llama_cpp.Llama, texts: Sequence[list[int]]) -> None:
    """Evaluate all texts as sequences of one batch."""
    batch = llama_cpp._internals.LlamaBatch(
        n_tokens=sum(map(len, texts)), embd=0, n_seq_max=len(texts), verbose=False
    )
    for number, text in enumerate(texts):
        batch.add_sequence(text, number, True)
    llama._ctx.decode(batch)
    batch.close()


class Way(NamedTuple):
    """How both programs compute texts. ``settings``: of the ``Llama``."""

    settings: dict[str, Any]
    texts: Sequence[list[int]] = (TEXT,)
    golden: Callable[[PreTrainedModel, Sequence[list[int]]], None] = at_once
    mine: Callable[[llama_cpp.Llama, Sequence[list[int]]], None] = evaluated


WAYS = {
    "whole": Way({}),
    "ubatch": Way({"n_ubatch": 8}),
    "batched": Way({"embedding": True}, SHORT, mine=in_a_batch),  # lets it have sequences
    "generated": Way({}, golden=generated, mine=one_by_one),
}


# -- cases ---------------------------------------------------------------------------------------


class Models:
    """The models of one kind, and golden's runs of them, each recorded once."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.source = kind, folder, made.model(kind)
        self._golden: dict[str, ld.Run] = {}

    def golden(self, way: str, settings: dict[str, Any]) -> ld.Run:
        key = f"golden-{way}-{'-'.join(settings)}"
        if key not in self._golden:
            source = made.model(self.kind, **settings) if settings else self.source
            with ld.dump(source, name=key, path=self.folder, **OPTIONS) as run, torch.no_grad():
                WAYS[way].golden(source, WAYS[way].texts)
            self._golden[key] = run
        return self._golden[key]

    def mine(self, way: str, precision: str, planted: Planted | None) -> ld.Run:
        name, _, flash = precision.partition("+")
        path = self.folder / "model.gguf"
        made.write(self.source, path, name, planted.change if planted else None)
        cache = {"flash_attn": True} if flash else {"type_k": 0, "type_v": 0}
        llama = llama_cpp.Llama(
            str(path), n_ctx=128, logits_all=True, verbose=False, n_threads=2,
            **cache, **WAYS[way].settings,
        )  # fmt: skip
        with ld.dump(llama, name="mine", path=self.folder, **OPTIONS) as run:
            WAYS[way].mine(llama, WAYS[way].texts)
        llama.close()
        return run


def mark(models: Models, precision: str, case: str | Planted) -> Mark:
    """Record and compare one pair. ``case``: a way, or a bug."""
    planted = None if isinstance(case, str) else case
    way = case if isinstance(case, str) else "whole"
    result = Mark(models.kind, precision, planted.bug.name if planted else way)
    try:
        mine = models.mine(way, precision, planted)
        golden = models.golden(way, planted.golden if planted else {})
        report = ld.compare(golden, mine, progress=False)
        judge(result, report, planted)
        count(result, golden, report)
    except Exception:
        result.blamed = [traceback.format_exc(limit=-3)]
    if planted and not result.grade:
        result.grade = "wrong"
    return result


def count(result: Mark, golden: ld.Run, report: ld.Report) -> None:
    """Count golden's module outputs, those too that the comparison by token left out."""
    partners: dict[tuple[str, str], bool] = {}
    for each in report.differences:
        if each.pair.golden is not None:
            key = each.pair.golden.site.path, each.pair.golden.site.slot
            has_partner = each.verdict != "unmatched" or not each.is_mismatch
            if each.pair.golden.site.role == "output":
                partners[key] = partners.get(key, False) or has_partner
    sites = [record.site for record in golden.records(role="output")]
    outputs = {(site.path, site.slot) for site in sites if "/" not in site.path}
    missing = sorted(key for key in outputs if not partners.get(key))
    result.outputs, result.matched = len(outputs), len(outputs) - len(missing)
    result.alone = [" ".join(key) for key in missing]


def cases(given: argparse.Namespace, source: PreTrainedModel) -> Iterator[str | Planted]:
    weights, settings = made.weights_of(source), made.settings_of(source)
    for way in WAYS:
        if not given.cases or way in given.cases:
            yield way
    for planted in SETS[given.set]:
        if planted.fits(weights, settings) and (not given.cases or planted.bug.name in given.cases):
            yield planted


def alone(marks: Sequence[Mark]) -> str:
    """Return what of golden has no partner in a right file, each name with its count of layers."""
    lines = []
    for each in marks:
        if not each.grade and each.case in ("whole", "generated"):
            names = Counter(
                ".".join("*" if part.isdigit() else part for part in name.split("."))
                for name in each.alone
            )
            told = ", ".join(f"{name} ({count})" for name, count in names.items())
            lines.append(f"{each.family} {each.precision} {each.case}: {told or '-'}")
    return "\n".join(lines)


def main() -> None:
    def several(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("precisions", nargs="*", default=["f32"])
    parser.add_argument("--kinds", type=several, default=list(made.KINDS))
    parser.add_argument("--cases", type=several, default=[])
    parser.add_argument("--set", choices=SETS, default="all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    marks = []
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            models = Models(kind, Path(folder))
            for precision in given.precisions:
                marks += [mark(models, precision, case) for case in cases(given, models.source)]
                print(f"{kind} {precision}: {len(marks)} cases", file=sys.stderr, flush=True)
    unseen = {each.bug.name for each in SETS["unseen"]}
    seen = [each for each in marks if each.case not in unseen]
    print(f"{table(marks)}\n\n{misses(seen)}\n\n{alone(marks)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(m) for m in marks], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
