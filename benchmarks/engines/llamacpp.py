"""Scores the comparison of llama.cpp with transformers on files with one bug of a conversion each.

Needs llama-cpp-python, gguf, torch and transformers: the environment of `make test-engines`.

    PYTHONPATH=. .venv/llamacpp/bin/python benchmarks/engines/llamacpp.py f32 f16 q8_0

Each bug is told with the module of golden in which it begins. A finding is right if it is there.
Flash attention is on where the precision has ``+flash``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import llama_cpp
import torch

import llmdebug_nb as ld

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import llamacpp_model as made
from llamacpp_model import Bug, Settings, Weights

PROMPT = [(7 * at * at + 11 * at + 10) % 500 for at in range(28)]


def scaled(name: str, by: float) -> Bug:
    def bug(weights: Weights, _: Settings) -> None:
        weights[name] = weights[name] * by

    return bug


def swapped(first: str, second: str) -> Bug:
    """Swap all weights whose names begin so."""

    def bug(weights: Weights, _: Settings) -> None:
        for name in [name for name in weights if name.startswith(first)]:
            other = second + name[len(first) :]
            weights[name], weights[other] = weights[other], weights[name]

    return bug


def setting(name: str, value: float) -> Bug:
    def bug(_: Weights, settings: Settings) -> None:
        settings[name] = value

    return bug


def rows_in_pairs(weights: Weights, _: Settings) -> None:
    """Reorder q and k once more: wrong for either kind of rope."""
    for name in weights:
        if ".attn_q." in name or ".attn_k." in name:
            heads = made.HEADS if ".attn_q." in name else made.KV_HEADS
            weights[name] = made.permuted(weights[name], heads)


def tied(weights: Weights, _: Settings) -> None:
    weights["output.weight"] = weights["token_embd.weight"]


def norm_less_one(weights: Weights, _: Settings) -> None:
    weights["blk.2.attn_norm.weight"] = weights["blk.2.attn_norm.weight"] - 1


def no_last_norm(weights: Weights, _: Settings) -> None:
    weights["output_norm.weight"] = weights["output_norm.weight"] * 0 + 1


def heads_of_keys(weights: Weights, _: Settings) -> None:
    weight = weights["blk.3.attn_k.weight"]
    half = len(weight) // 2
    weights["blk.3.attn_k.weight"] = weight[[*range(half, 2 * half), *range(half)]]


def down_reversed(weights: Weights, _: Settings) -> None:
    weights["blk.1.ffn_down.weight"] = weights["blk.1.ffn_down.weight"][:, ::-1]


BUGS: dict[str, tuple[Bug, str]] = {
    "rows of q and k in another order": (rows_in_pairs, "model.layers.0.self_attn"),
    "rope base 500,000": (setting("base", 5e5), "model.layers.0.self_attn"),
    "positions divided by 2": (setting("scaling", 2.0), "model.layers.0.self_attn"),
    "epsilon 1e-2": (setting("eps", 1e-2), "model.layers.0.input_layernorm"),
    "head tied to the embedding": (tied, "lm_head"),
    "layers 1 and 2 swapped": (swapped("blk.1.", "blk.2."), "model.layers.1.input_layernorm"),
    "gate and up of layer 2 swapped": (
        swapped("blk.2.ffn_gate.", "blk.2.ffn_up."), "model.layers.2.mlp",
    ),
    "values of layer 1 scaled by 1.5": (
        scaled("blk.1.attn_v.weight", 1.5), "model.layers.1.self_attn",
    ),
    "norm of layer 2 less one": (norm_less_one, "model.layers.2.input_layernorm"),
    "no weight in the last norm": (no_last_norm, "model.norm"),
    "key heads of layer 3 swapped": (heads_of_keys, "model.layers.3.self_attn"),
    "inputs of a down projection reversed": (down_reversed, "model.layers.1.mlp"),
}  # fmt: skip


def compared(golden: ld.Run, path: Path, folder: Path, flash: bool) -> tuple[str, str]:
    """Return the verdict, and golden's path in the first finding."""
    cache = {} if flash else {"type_k": 0, "type_v": 0}
    llama = llama_cpp.Llama(
        str(path), n_ctx=128, logits_all=True, verbose=False, n_threads=2, flash_attn=flash, **cache
    )
    with ld.dump(llama, name="gguf", path=folder, tokens="all") as run:
        llama.eval(PROMPT)
    llama.close()
    report = ld.compare(golden, run, progress=False)
    first = next(iter(report.findings), None)
    return report.verdict, "" if first is None else first.path


def main(precisions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in made.KINDS:
            score(kind, precisions, Path(folder))


def score(kind: str, precisions: list[str], folder: Path) -> None:
    """Print how each file of a model is judged, and how many bugs of a precision are found."""
    source = made.model(kind)
    with ld.dump(source, name="hf", path=folder, tokens="all") as golden, torch.no_grad():
        source(torch.tensor([PROMPT]))
    for each in precisions:
        precision, _, flash = each.partition("+")
        right = 0
        for name, (bug, place) in {"no bug": (None, ""), **BUGS}.items():
            path = folder / "model.gguf"
            made.write(source, path, precision, bug)
            verdict, found = compared(golden, path, folder, bool(flash))
            good = verdict == "within_noise" if bug is None else bool(place) and place in found
            right += good and bug is not None
            print(f"{kind} {each} {name}: {verdict} {found or '-'} {'' if good else 'WRONG'}")
        print(f"== {kind} {each}: {right} of {len(BUGS)} right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["f32"])
