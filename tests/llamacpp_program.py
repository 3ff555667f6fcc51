"""Records llama.cpp itself; run by `test_llamacpp_itself.py` with a Python that has it.

It writes a JSON object: what was computed with and without a recording, and the comparisons.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import torch

import llamacpp_architectures
import llamacpp_model
import llmdebug_nb as ld

PROMPT = list(range(10, 30))
OF_ONE_FILE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K")


def opened(path: Path, **more: object) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=128, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0,
        **more,
    )  # fmt: skip


def generated(llama: llama_cpp.Llama, prompt: list[int], count: int = 3) -> list[int]:
    llama.reset()
    llama.eval(prompt)
    for _ in range(count):
        llama.eval([int(llama.scores[llama.n_tokens - 1].argmax())])
    return llama.input_ids[: llama.n_tokens].tolist()


def bits(llama: llama_cpp.Llama) -> bytes:
    return llama.scores[: llama.n_tokens].tobytes()


def left_as_it_was(path: Path, folder: Path) -> dict[str, object]:
    """Interrupt a recording between two evaluations, and go on with the same text."""
    plain, llama = opened(path), opened(path)
    for each in (plain, llama):
        each.eval(PROMPT)
    own = llama._ctx.ctx
    try:
        with ld.dump(llama, name="broken", path=folder, tokens="all") as run:
            llama.eval([40, 41])
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    plain.eval([40, 41])
    for each in (plain, llama):
        each.eval([50])
    rows = run.rows()
    return {
        "bits": bits(plain) == bits(llama),
        "context": llama._ctx.ctx == own and "decode" not in vars(llama._ctx),
        "state": plain.save_state().llama_state == llama.save_state().llama_state,
        "cached": int(rows["row"].isna().sum()),
    }


def compared(kind: str, path: Path, source: torch.nn.Module, folder: Path) -> dict[str, object]:
    plain = opened(path)
    tokens = generated(plain, PROMPT)
    llama = opened(path)
    with ld.dump(llama, name="gguf", path=folder, tokens="all") as run:
        recorded = generated(llama, PROMPT)
    with ld.dump(source, name="hf", path=folder, tokens="all") as golden, torch.no_grad():
        source(torch.tensor([tokens]))
    report = ld.compare(golden, run, progress=False)
    found = {
        each.pair.golden.site.path
        for each in report.differences
        if each.pair.golden is not None and each.pair.mine is not None
    }
    paths = {record.site.path for record in golden.records(role="output")}
    return {
        "file": str(path),
        "same": tokens == recorded and bits(plain) == bits(llama),
        "verdict": report.verdict,
        "alone": sorted(path for path in paths - found if "/" not in path),
        "coarse": run.coarse,
        "rows": run.rows()[["request", "position", "token"]].values.tolist(),
        "problems": run.meta["problems"],
        "modules": sorted(node.path for node in run.nodes),
        "tokens": tokens,
    }


def filtered(path: Path, folder: Path) -> dict[str, object]:
    llama = opened(path)
    with ld.dump(
        llama, name="some", path=folder, tokens="1", layers="blk.2.attn_*", stats_only=True
    ) as run:
        generated(llama, PROMPT)
    try:
        with ld.dump(llama, name="none", path=folder, layers="nothing.*"):
            refused = ""
    except ld.errors.EmptyDumpError as error:
        refused = str(error)
    return {
        "paths": sorted({record.site.path.partition("/")[0] for record in run.records()}),
        "steps": sorted({record.site.step for record in run.records()}),
        "kept": sum(record.payload is not None for record in run.records()),
        "refused": refused,
    }


def by_request(path: Path, folder: Path) -> dict[str, object]:
    """Select one text of two, and what it was fed after its prompt."""
    llama = opened(path, n_ubatch=8)
    with ld.dump(
        llama, name="one", path=folder, requests="1", tokens="0,2", stats_only=True
    ) as run:
        generated(llama, PROMPT)
        generated(llama, PROMPT[::-1])
    steps = {record.site.step for record in run.records()}
    rows = run.rows()
    rows = rows[rows["step"].isin(steps)]
    return {"rows": rows[["request", "position"]].values.tolist()}


def coarse(source: torch.nn.Module, folder: Path) -> dict[str, object]:
    """Compare right files of several precisions, with a cache in f16, and wrong files.

    Golden has the model's weights, or those of the file.
    """

    def in_floats(model: torch.nn.Module) -> ld.Run:
        with ld.dump(model, name="floats", path=folder, tokens="all") as run, torch.no_grad():
            model(torch.tensor([PROMPT]))
        return run

    floats = in_floats(source)

    def tied(weights: llamacpp_model.Weights, _: llamacpp_model.Settings) -> None:
        weights["output.weight"] = weights["token_embd.weight"]

    def smoothed(_: llamacpp_model.Weights, settings: llamacpp_model.Settings) -> None:
        settings["attention.layer_norm_rms_epsilon"] = 1e-2

    def turned(weights: llamacpp_model.Weights, _: llamacpp_model.Settings) -> None:
        for name in weights:
            if heads := llamacpp_model.heads_of(name):
                weights[name] = llamacpp_model.permuted(weights[name], heads)

    def halved(weights: llamacpp_model.Weights, _: llamacpp_model.Settings) -> None:
        weights["blk.1.attn_v.weight"] = weights["blk.1.attn_v.weight"] * 0.5

    def compared(
        precision: str, flash: bool, bug: llamacpp_model.Bug | None, own: bool = False
    ) -> dict[str, object]:
        path, golden = folder / "coarse.gguf", floats
        if own:
            llamacpp_model.write(source, path, precision)
            golden = in_floats(llamacpp_model.with_weights_of(source, path))
        llamacpp_model.write(source, path, precision, bug)
        llama = llama_cpp.Llama(
            str(path), n_ctx=128, logits_all=True, verbose=False, n_threads=1, flash_attn=flash
        )
        with ld.dump(llama, name=precision, path=folder, tokens="all") as run:
            llama.eval(PROMPT)
        llama.close()
        report = ld.compare(golden, run, progress=False)
        return {
            "coarse": run.coarse, "rounding": run.rounding, "verdict": report.verdict,
            "notes": report.notes(), "found": [str(each.path) for each in report.findings],
        }  # fmt: skip

    return {
        "q8_0": compared("q8_0", False, None),
        "f16 flash": compared("f16", True, None),
        "q8_0 wrong": compared("q8_0", False, halved),
        "q4_K": compared("q4_K", False, None),
        **{f"{kind} in floats": compared(kind, False, None, True) for kind in OF_ONE_FILE},
        "q4_K halved": compared("q4_K", False, halved, True),
        "q4_K tied": compared("q4_K", False, tied, True),
        "q4_K smoothed": compared("q4_K", False, smoothed, True),
        "q4_K turned": compared("q4_K", False, turned, True),
    }


def recorded(path: Path, folder: Path, **more: object) -> ld.Run:
    """Record a file with its weights: a prompt and a decode."""
    llama = llama_cpp.Llama(
        str(path), n_ctx=128, logits_all=True, verbose=False, n_threads=1, **more
    )
    with ld.dump(llama, name="x", path=folder, tokens="all", weights=True) as run:
        llama.eval(PROMPT)
        llama.eval([7])
    llama.close()
    return run


def told(run: ld.Run, folder: Path, **more: object) -> dict[str, object]:
    """Compute its nodes again. ``worst``: of those that round to nothing coarser than float32."""
    result = ld.opcheck(run, progress=False, output=folder, **more).result
    errors = [
        out.l2 or 0.0
        for each in result.calls
        if each.op.removeprefix("Ggml.") not in ("FLASH_ATTN_EXT", "GELU", "GEGLU")
        for out in each.outputs
    ]
    return {
        "checked": result.checked, "total": result.total, "worst": max(errors, default=0.0),
        "wrong": sorted({each.key.path for each in result.wrong}),
        "operations": sorted({each.op.removeprefix("Ggml.") for each in result.calls}),
    }  # fmt: skip


def checked(folder: Path) -> dict[str, object]:
    """Compute the nodes of right runs again; and with the weights of a file, right and wrong."""
    source, path = llamacpp_model.model("llama"), folder / "checked.gguf"

    def doubled(weights: llamacpp_model.Weights, _: llamacpp_model.Settings) -> None:
        weights["blk.1.ffn_up.weight"] = weights["blk.1.ffn_up.weight"] * 1.5

    found: dict[str, object] = {}
    for precision in ("f32", "f16", "q8_0", "q4_K", "q5_K", "q6_K"):
        llamacpp_model.write(source, path, precision)
        run = recorded(path, folder)
        found[precision] = told(run, folder)
        if precision == "q8_0":
            found["its file"] = told(run, folder, weights=path)
            flash = recorded(path, folder, flash_attn=True, type_k=8, type_v=8)
            found["flash"] = told(flash, folder)
            llamacpp_model.write(source, path, precision, doubled)
            found["another file"] = told(run, folder, weights=path)
    return found


def checked_architectures(folder: Path) -> dict[str, object]:
    """Compute the nodes of other architectures again."""

    def stretched(weights: llamacpp_model.Weights, settings: llamacpp_model.Settings) -> None:
        settings |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        }  # fmt: skip
        pairs = llamacpp_model.HIDDEN // llamacpp_model.HEADS // 2
        weights["rope_freqs.weight"] = torch.linspace(1, 4, pairs).numpy()

    found: dict[str, object] = {}
    path = folder / "checked.gguf"
    for kind, precision, bug in (
        ("llama", "f32", stretched), ("mixtral", "q4_K", None), ("qwen2moe", "q8_0", None),
        ("gemma2", "q8_0", None),
    ):  # fmt: skip
        llamacpp_model.write(llamacpp_model.model(kind), path, precision, bug)
        found[kind] = told(recorded(path, folder), folder)
    for kind in llamacpp_architectures.ARCHITECTURES:
        llamacpp_architectures.write(kind, path)
        found[kind] = told(recorded(path, folder, flash_attn=False), folder)
        found[f"{kind} flash"] = told(recorded(path, folder, flash_attn=True), folder)
    return found


def main(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind in llamacpp_model.KINDS:
        source, path = llamacpp_model.model(kind), folder / f"{kind}.gguf"
        llamacpp_model.write(source, path, "f32")
        found[kind] = compared(kind, path, source, folder / kind)
    path = folder / "llama.gguf"
    found["broken"] = left_as_it_was(path, folder)
    found["filtered"] = filtered(path, folder)
    found["by_request"] = by_request(path, folder)
    found["coarse"] = coarse(llamacpp_model.model("llama"), folder)
    found["nodes"] = checked(folder)
    found["architectures"] = checked_architectures(folder)
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1])
    (where / "result.json").write_text(json.dumps(main(where)))
