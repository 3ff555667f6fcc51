"""Pairs of runs of engines that can be compared where no engine is installed.

They are the dumps that real engines wrote (``tests/data``), and runs of the fakes that tests record
in place of vLLM and llama.cpp.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import fake_ggml
import fake_vllm
import llmdebug_nb as ld

TESTS = Path(__file__).resolve().parents[2] / "tests"
Runs = tuple[ld.Run, ld.Run]
Pair = Callable[[Path], Runs]  # makes both runs in a folder
PACKED = {
    "llamacpp": ("golden", "right", "q8_0", "wrong"),
    "vllm": ("golden", "right", "wrong"),
}
# nodes of the fake graph that give what is half as large again
NODES = (
    "embd/GET_ROWS",
    "norm-0/RMS_NORM",
    "Qcur-0/MUL_MAT",
    "Kcur-0/ROPE",
    "kq_soft_max-0/SOFT_MAX",
    "kqv_out-0/CONT",
    "ffn_gate-0/MUL_MAT",
)


def packed(engine: str, names: tuple[str, str], folder: Path) -> Runs:
    """Return two runs that a real engine and transformers wrote."""
    zipfile.ZipFile(TESTS / "data" / f"{engine}.zip").extractall(folder)
    golden, mine = (ld.open_run(folder / name) for name in names)
    return golden, mine


def ggml(kind: int, neox: bool, node: str, folder: Path) -> Runs:
    """Return a right run of the fake llama.cpp, and one that differs from it."""

    def recorded(name: str, llama: fake_ggml.Fake) -> ld.Run:
        with ld.dump(llama, name=name, path=folder, tokens="all", weights=True) as run:
            llama.eval([3, 1, 4, 1, 5])
            llama.eval([9])
        return run

    with pytest.MonkeyPatch.context() as patch:
        fake_ggml.installed(patch)
        mine = fake_ggml.Fake(kind, neox)
        if node:
            mine.spoil[node] = lambda x: (x * np.float32(1.5)).astype(np.float32)
        return recorded("golden", fake_ggml.Fake()), recorded("mine", mine)


def vllm(weight: str, folder: Path) -> Runs:
    """Return the model on whole texts, and the fake vLLM that serves them in parts.

    ``weight``: of the engine, a tenth too large.
    """
    options = {"path": folder, "tokens": "all"}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        fake_vllm.installed(patch)
        llm = fake_vllm.LLM(fake_vllm.Runner(padding=2))
        model = fake_vllm.Whole()
        model.load_state_dict(llm.runner.model.state_dict())
        if weight:
            llm.runner.model.get_parameter(weight).mul_(1.1)
        with ld.dump(llm, name="mine", **options) as mine:
            llm.generate(fake_vllm.served())
        with ld.dump(model, name="golden", **options) as golden:
            for text in llm.runner.tokens.values():
                model(torch.tensor([text[:-1]]), torch.arange(len(text) - 1)[None])
    return golden, mine


def _pairs() -> Iterator[tuple[str, Pair]]:
    for engine, names in PACKED.items():
        for two in combinations(names, 2):
            yield f"{engine}/{two[0]}, {two[1]}", partial(packed, engine, two)
    for weight in ("", "embed.weight", "mlp.weight", "head.weight"):
        yield f"fake vllm/{weight or 'right'}", partial(vllm, weight)
    for name, kind, neox in (
        ("right", fake_ggml.F32, False),
        ("f16", fake_ggml.F16, False),
        ("q8_0", fake_ggml.Q8_0, False),
        ("neox", fake_ggml.F32, True),
    ):
        yield f"fake llamacpp/{name}", partial(ggml, kind, neox, "")
    for node in NODES:
        yield f"fake llamacpp/{node}", partial(ggml, fake_ggml.F32, False, node)


PAIRS: dict[str, Pair] = dict(_pairs())
