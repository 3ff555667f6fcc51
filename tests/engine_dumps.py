"""Records what `test_engine_dumps.py` reads: small models in real engines, and in transformers.

    PYTHONPATH=. .venv/engines/bin/python tests/engine_dumps.py vllm
    PYTHONPATH=. .venv/llamacpp/bin/python tests/engine_dumps.py llamacpp

Each writes `tests/data/ENGINE.zip`. It holds the runs `golden`, of transformers, and those of the
engine: `right`, `wrong` with one bug, and for llama.cpp `q8_0` with quantised weights. They hold no
sources and no weights.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import llmdebug_nb as ld

DATA = Path(__file__).parent / "data"
PROMPTS = [[token * (k + 3) % 120 for token in range(10, 10 + n)] for k, n in enumerate((5, 11, 3))]
SHORT = PROMPTS[::2]  # llama.cpp's
OUTPUT = 3  # tokens that vLLM generates for each prompt
OPTIONS: dict[str, Any] = {"tokens": "all", "sources": False}
VALUES = "model.layers.1.self_attn.v_proj"  # vLLM gets it 1.5 times as large in the wrong run


def small_qwen2() -> Qwen2ForCausalLM:
    """Return a random model whose matrices keep the size of what they multiply."""
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        tie_word_embeddings=False, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(values if "embed" in name else values * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(values * 0.5 if name.endswith("bias") else 1 + 0.2 * values)
    return model.eval()


def record_golden(model: PreTrainedModel, texts: Sequence[list[int]], folder: Path) -> None:
    with ld.dump(model, name="golden", path=folder, **OPTIONS), torch.no_grad():
        for text in texts:
            model(torch.tensor([text]))


def vllm(folder: Path) -> None:
    """Record vLLM as it serves all prompts at once, in parts of at most 8 tokens."""
    os.chdir(folder)  # the dump names the model as it is given
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    model = small_qwen2()
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for name, factor in (("right", 1.0), ("wrong", 1.5)):
        state = {key: values.clone() for key, values in model.state_dict().items()}
        state[f"{VALUES}.weight"] *= factor
        state[f"{VALUES}.bias"] *= factor
        model.save_pretrained(folder / name / "model", state_dict=state)
        llm = LLM(
            f"{name}/model", skip_tokenizer_init=True, enforce_eager=True,
            dtype="float32", max_model_len=64, max_num_batched_tokens=8, max_num_seqs=3,
            enable_prefix_caching=False,
        )  # fmt: skip
        with ld.dump(llm, name=name, path=folder / "runs", **OPTIONS):
            done = llm.generate(prompts, sampling, use_tqdm=False)
        llm.llm_engine.engine_core.shutdown()
        if name == "right":
            given = zip(PROMPTS, done, strict=True)
            # the last token is fed to no step
            texts = [[*prompt, *out.outputs[0].token_ids][:-1] for prompt, out in given]
    record_golden(model, texts, folder / "runs")


def llamacpp(folder: Path) -> None:
    """Record llama.cpp as it evaluates one text after the other, in parts of at most 4 tokens."""
    import llama_cpp

    import llamacpp_model as made

    def rows_in_pairs(weights: made.Weights, _: made.Settings) -> None:
        for name in weights:
            if made.heads_of(name):
                weights[name] = made.permuted(weights[name], made.heads_of(name))

    os.chdir(folder)
    model = made.model("llama", num_hidden_layers=2)
    for name, precision, bug in (
        ("right", "f32", None),
        ("q8_0", "q8_0", None),
        ("wrong", "f32", rows_in_pairs),
    ):
        made.write(model, folder / "model.gguf", precision, bug)
        llama = llama_cpp.Llama(
            "model.gguf", n_ctx=64, n_ubatch=4, logits_all=True, verbose=False,
            n_threads=2, type_k=0, type_v=0,
        )  # fmt: skip
        with ld.dump(llama, name=name, path=folder / "runs", **OPTIONS):
            for prompt in SHORT:
                llama.reset()
                llama.eval(prompt)
        llama.close()
    record_golden(model, SHORT, folder / "runs")


def main(engine: str) -> None:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        {"vllm": vllm, "llamacpp": llamacpp}[engine](Path(folder))
        runs = Path(folder) / "runs"
        target = DATA / f"{engine}.zip"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as packed:
            for path in sorted(runs.rglob("*")):
                if path.is_file():
                    packed.write(path, path.relative_to(runs))
    print(target, f"{target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1])
