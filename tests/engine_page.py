"""Runs the Python examples of an engine's page; run by `test_engine_pages.py`, with that engine.

    python engine_page.py PAGE FOLDER

The folder gets what the page takes for granted: a model, a program that serves it. The program
writes a JSON object: the rows of the first recording and what the comparison said.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

import llmdebug_nb as ld

DOCS = Path(__file__).resolve().parents[1] / "docs"
OFFLINE = """
import vllm

if __name__ == "__main__":
    llm = vllm.LLM("model", enforce_eager=True)
    llm.generate(["t5 t7 t9"], vllm.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
"""
SERVE = """
import llama_cpp

llm = llama_cpp.Llama("model.gguf", logits_all=True)
for prompt in ("Good morning", "Good night"):
    llm(prompt, max_tokens=4, temperature=0)
"""


def examples(page: str, language: str) -> list[str]:
    """Return the blocks of a page in ``python`` or ``sh``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def vllm() -> dict[str, Any]:
    import vllm
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from vllm_program import checkpoint

    model = checkpoint(Path("model"))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained("model")
    Path("serve_offline.py").write_text(OFFLINE)
    sampling = vllm.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return {
        "vllm": vllm, "model": model, "prompts": ["t5 t7 t9", "t20 t3 t11 t400 t8"],
        "sampling_params": sampling,
    }  # fmt: skip


def llamacpp() -> dict[str, Any]:
    import llama_cpp

    import llamacpp_model

    model = llamacpp_model.model("llama")
    llamacpp_model.write(model, Path("model.gguf"), "f32")
    Path("serve.py").write_text(SERVE)
    return {"llama_cpp": llama_cpp, "model": model, "prompt": "Good morning"}


def openvino() -> dict[str, Any]:
    import openvino

    from models import llama, prompt

    torch_model = llama()
    torch_model.config.use_cache = False
    inputs = {"input_ids": prompt(), "attention_mask": torch.ones_like(prompt())}
    feed = {name: values.numpy() for name, values in inputs.items()}
    return {"openvino": openvino, "torch_model": torch_model, "inputs": inputs, "feed": feed}


def main(page: str, folder: Path) -> None:
    os.chdir(folder)
    torch.manual_seed(0)
    given = {"vllm": vllm, "llamacpp": llamacpp, "openvino": openvino}[page]()
    names: dict[str, Any] = {"os": os, "torch": torch, "ld": ld, **given}
    for code in examples(f"{page}.md", "python"):
        exec(code, names)
    rows, report = names.get("rows"), names["report"]
    result = {
        "rows": [] if rows is None else rows[["request", "position"]].astype(str).values.tolist(),
        "verdict": report.verdict,
        "findings": len(report.findings),
        "matched": report.coverage.observables_matched,
    }
    Path("result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
