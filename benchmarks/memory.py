"""Peak memory of comparing two dumps that are larger than memory, by their size.

    python benchmarks/memory.py 1 5 20          sizes in GB; two dumps of each are made and deleted
    python benchmarks/memory.py 1 --folder /big --keep

A Llama of 24 layers runs over prompts of 1,024 tokens until its dump has that size; mine has
another epsilon in the norm of one layer. Each comparison runs in a process of its own, with the
search for the cause; the memory is that of its process and of the workers that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

GB = 10**9
_LAYERS, _TOKENS = 24, 1024
_EVERY = 0.02  # seconds between two looks at the memory


def record(folder: Path, name: str, nbytes: int) -> None:
    """Record forward passes until the dump has that size."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import llmdebug_nb as ld

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": _LAYERS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=16, vocab_size=8192)).eval()
    if name == "mine":
        model.model.layers[_LAYERS // 2].input_layernorm.variance_epsilon = 1e-2
    prompts = torch.Generator().manual_seed(1)
    with torch.no_grad(), ld.dump(model, name=name, path=folder, tokens="all") as run:
        while run.info()["bytes"] < nbytes:
            ids = torch.randint(3, 8000, (1, _TOKENS), generator=prompts)
            model(input_ids=ids, use_cache=False)


def compare(folder: Path) -> None:
    """Compare the two dumps; print the figures as JSON."""
    peak = _Peak()
    import llmdebug_nb as ld

    golden, mine = (ld.open_run(f"{folder}/{name}") for name in ("golden", "mine"))
    before, begun = peak.seen, time.perf_counter()
    report = ld.compare(golden, mine, progress=False)
    measured, measured_in = peak.seen, time.perf_counter() - begun
    findings = report.findings
    found = {
        "bytes": golden.info()["bytes"], "tensors": len(golden), "seconds": measured_in,
        "explained": time.perf_counter() - begun, "before": before, "measured": measured,
        "peak": peak.stop(), "verdict": report.verdict, "findings": len(findings),
        "first": findings[0].path if findings else "",
    }  # fmt: skip
    print(json.dumps(found))


class _Peak:
    """Samples the resident memory of this process and of those that it started."""

    def __init__(self) -> None:
        self.seen, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        me = psutil.Process()
        while not self._ended.wait(_EVERY):
            resident = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    resident += process.memory_info().rss
                except psutil.Error:  # it ended
                    continue
            self.seen = max(self.seen, resident)

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.seen


def _run(*words: str) -> str:
    return subprocess.run(
        [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=float, default=[1.0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--record", nargs=2)
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    if args.record:
        record(args.folder, args.record[0], int(args.record[1]))
        return
    if args.compare:
        compare(args.folder)
        return
    for size in args.sizes:
        folder = args.folder / f"llmdebug-memory-{size:g}"
        try:
            for name in ("golden", "mine"):
                if not (folder / name).is_dir():
                    _run("--folder", str(folder), "--record", name, str(int(size * GB)))
            found = json.loads(_run("--folder", str(folder), "--compare").splitlines()[-1])
        finally:
            if not args.keep:
                shutil.rmtree(folder, ignore_errors=True)
        print(
            f"{found['bytes'] / GB:5.1f} GB  {found['tensors']:6,} tensors "
            f" {found['peak'] / GB:5.2f} GB resident at most"
            f" ({found['before'] / GB:.2f} opened, {found['measured'] / GB:.2f} compared) "
            f" {found['seconds']:5.0f} s compared, {found['explained']:5.0f} s explained "
            f" {found['verdict']}, {found['findings']} finding(s), first at {found['first']!r}"
            f"  [{os.cpu_count()} CPUs]",
            flush=True,
        )


if __name__ == "__main__":
    main()
