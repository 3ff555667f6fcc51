"""Other tools that record what a model computes, as `capture.py` measures them.

An adapter takes a model of its own (several tools leave hooks behind), the model's inputs and a
folder to write to; it returns a function that does some work under its tool. The table shows the
error that it raises: ImportError if the tool, or something it needs, is not installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

Work = Callable[[], None]
Run = Callable[[Work], None]


class Peer(NamedTuple):
    """``work``: `generate` or `forward` of `capture.py`. ``start``: the adapter."""

    work: str
    start: Callable[[torch.nn.Module, dict[str, Any], Path], Run]


def debug_mode(
    model: torch.nn.Module, inputs: dict[str, Any], folder: Path, hashes: bool = False
) -> Run:
    """PyTorch's log of every operator, in memory; ``hashes``: with norms of inputs and outputs.

    The API is private and may change with any release.
    """
    from torch.utils._debug_mode import DebugMode

    def run(work: Work) -> None:
        if not hashes:
            with DebugMode():
                work()
            return
        with DebugMode(), DebugMode.log_tensor_hashes(hash_fn="norm", hash_inputs=True):
            work()

    return run


def msprobe(model: torch.nn.Module, inputs: dict[str, Any], folder: Path, level: str) -> Run:
    """Statistics of msprobe's PrecisionDebugger: L0 are modules, L1 functions, mix both.

    It is made once and each run is a step of it. After each, it restores the replaced functions.
    """
    os.environ["MSPROBE_LOG_LEVEL"] = "3"  # errors
    from msprobe.pytorch import PrecisionDebugger

    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".json")
    statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    said = {"task": "statistics", "dump_path": str(folder), "rank": [], "step": [], "level": level}
    config.write_text(json.dumps({**said, "statistics": statistics}), encoding="utf-8")
    debugger = PrecisionDebugger(config_path=str(config))
    config.unlink()
    functions = debugger.service.api_register
    replaces = functions.all_api_registered
    functions.restore_all_api()

    def run(work: Work) -> None:
        if replaces:
            functions.register_all_api()
        debugger.start(model)
        work()
        debugger.stop()
        debugger.step()
        functions.restore_all_api()
        if not any(folder.rglob("dump.json")):
            raise RuntimeError("it wrote no dump.json")

    return run


def torchlens_trace(model: torch.nn.Module, inputs: dict[str, Any], folder: Path) -> Run:
    """TorchLens' graph of one forward pass with every value, in memory. It calls the model itself.

    Its replacements of torch's functions stay, since replacing them again would cost more than the
    pass. They make the run beside it some 5 % slower, which favours this tool.
    """
    import torchlens

    def run(_: Work) -> None:
        with torch.no_grad():
            torchlens.trace(model, (), inputs)

    return run


def torchlens_record(model: torch.nn.Module, inputs: dict[str, Any], folder: Path) -> Run:
    """TorchLens' leaner way to the same values, without the graph."""
    import torchlens

    def run(_: Work) -> None:
        with torch.no_grad():
            torchlens.record(model, (), inputs, default_op=True)

    return run


def nnsight_cache(model: torch.nn.Module, inputs: dict[str, Any], folder: Path) -> Run:
    """Inputs and outputs of every module, kept in memory by nnsight's cache; no statistics."""
    import nnsight

    wrapped = nnsight.NNsight(model)

    def run(work: Work) -> None:
        with wrapped.trace(inputs["input_ids"], fn=lambda _: work()) as tracer:
            cache = nnsight.save(tracer.cache(include_inputs=True))
        if not cache.keys():
            raise RuntimeError("it kept nothing")

    return run


PEERS = {
    "DebugMode, operators": Peer("generate", debug_mode),
    "DebugMode with hashes": Peer("generate", partial(debug_mode, hashes=True)),
    "msprobe, statistics L0": Peer("generate", partial(msprobe, level="L0")),
    "msprobe, statistics L1": Peer("generate", partial(msprobe, level="L1")),
    "msprobe, statistics mix": Peer("generate", partial(msprobe, level="mix")),
    "nnsight, values in memory": Peer("generate", nnsight_cache),
    "TorchLens record, prefill alone, values in memory": Peer("forward", torchlens_record),
    "TorchLens trace, prefill alone, values in memory": Peer("forward", torchlens_trace),
}
