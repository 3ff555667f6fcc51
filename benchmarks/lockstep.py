"""What a comparison in lockstep takes, beside two dumps: `python benchmarks/lockstep.py [LAYERS]`.

Golden is a Llama of random weights (width 512, 64 tokens) in float32, mine the same in bfloat16,
right or with one bug. Both ways record modules with all values, and must say the same. Bytes of
dumps: values on disk. Bytes of lockstep: values that were held at most.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import llmdebug_nb as ld

SHARES = (1.0, 0.25, 1 / 16)  # of the bytes of both dumps that the window may hold
WIDTH, TOKENS, VOCABULARY = 512, 64, 1024


@dataclass
class Way:
    """How a comparison went. ``ran``: how often each program ran."""

    name: str
    seconds: float
    nbytes: int
    ran: tuple[int, int]
    said: object

    def row(self, case: str) -> str:
        ran = f"{self.ran[0]} and {self.ran[1]}"
        return f"| {case} | {self.name} | {self.seconds:.1f} | {self.nbytes / 1e6:.1f} | {ran} |"


def models(layers: int, bug: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    golden = LlamaForCausalLM(config).eval()
    mine = copy.deepcopy(golden).to(torch.bfloat16)
    if bug:
        head = mine.model.layers[layers // 2].self_attn.k_proj
        head.register_forward_hook(lambda module, args, output: output * 1.25)
    return golden, mine


def said(report: ld.Report) -> object:
    rows = [(str(d.site), d.verdict, d.error) for d in report.differences]
    return report.verdict, [(f.path, f.cause) for f in report.findings], rows


def dumps(golden: Any, mine: Any, inputs: dict[str, Any]) -> Way:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for name, model in (("golden", golden), ("mine", mine)):
            with ld.dump(model, name=name, path=folder) as run:
                model(**inputs)
            runs.append(run)
        report = ld.compare(*runs, progress=False)
        nbytes = sum(run.info()["bytes"] for run in runs)
    return Way("two dumps", time.perf_counter() - start, nbytes, (1, 1), said(report))


def lockstep(golden: Any, mine: Any, inputs: dict[str, Any], window: int, **more: Any) -> Way:
    start = time.perf_counter()
    report = ld.lockstep(golden, mine, inputs, window=window, progress=False, **more)
    seconds, took = time.perf_counter() - start, report.lockstep
    assert took is not None
    name = f"lockstep, window {window / 1e6:.1f} MB"
    return Way(name, seconds, took.most, took.ran, said(report))


def measure(layers: int) -> Iterator[str]:
    inputs = {"input_ids": torch.arange(TOKENS)[None]}
    for bug in (False, True):
        golden, mine = models(layers, bug)
        case = "one bug" if bug else "right"
        dumps(golden, mine, inputs)  # loads what is loaded once
        whole = dumps(golden, mine, inputs)
        yield whole.row(case)
        for share in SHARES:
            way = lockstep(golden, mine, inputs, int(whole.nbytes * share * 4 / 3))
            assert way.said == whole.said, way.name
            yield way.row(case)
        if bug:
            for name, more in (("stop", {"stop": "first"}), ("graft", {"graft": True})):
                way = lockstep(golden, mine, inputs, int(whole.nbytes / 4), **more)
                way.name = f"{way.name}, {name}"
                yield way.row(case)


def main() -> None:
    print("| mine | way | s | MB of values | golden and mine ran |")
    print("| --- | --- | --- | --- | --- |")
    with torch.no_grad():
        for row in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 16):
            print(row, flush=True)


if __name__ == "__main__":
    main()
