"""Measure what recording statistics costs an engine: a model of 12 layers of 1024.

    python benchmarks/engines/cost.py vllm [--rounds 7] [--precision bfloat16]
    python benchmarks/engines/cost.py llamacpp [--rounds 7] [--precision q8_0] [--apis '!*']
    PYTHONPATH=.venv/openvino python benchmarks/engines/cost.py openvino [--layers 6 --hidden 512]

Each round generates once without and once with a recording, of the statistics of all modules (of
llama.cpp and OpenVINO: of all nodes, too, that ``--apis`` asks for) in all steps. vLLM serves the
requests together, the others one after the other; the model of OpenVINO has no cache, so that each
token costs a whole text. The table has medians with the least and the greatest, and the ratio of
the medians; starting and ending a recording are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import torch
import transformers

import llmdebug_nb as ld

PROMPT, OUTPUT, REQUESTS = 128, 8, 2
TEXTS = [[(k + 3) * at % 30000 for at in range(PROMPT)] for k in range(REQUESTS)]
Sizes = dict[str, int | bool]
Generate = Callable[[int], object]  # so many tokens for each text


def sizes(layers: int, hidden: int) -> Sizes:
    """Return the sizes of a Llama with heads of 64. ``hidden``: a multiple of 128."""
    return {
        "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip


def vllm(size: Sizes, precision: str, folder: Path) -> tuple[object, Generate]:
    from engines import serving

    origin = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    way = serving.Way({"max_model_len": 256, "max_num_batched_tokens": 256})
    llm = serving.engine(origin, origin.state_dict(), getattr(torch, precision), way, {})
    return llm, lambda tokens: serving.serve(llm, TEXTS, tokens)


def llamacpp(size: Sizes, precision: str, folder: Path) -> tuple[object, Generate]:
    import llama_cpp

    import llamacpp_model as made

    made.write(made.model("llama", **size), folder / "model.gguf", precision)
    llama = llama_cpp.Llama(
        str(folder / "model.gguf"), n_ctx=256, logits_all=False, verbose=False,
        n_threads=torch.get_num_threads(),
    )  # fmt: skip

    def generate(tokens: int) -> None:
        for text in TEXTS:
            llama.reset()
            llama.eval(text)
            for _ in range(tokens - 1):
                llama.eval([llama.sample(temp=0.0)])

    return llama, generate


def openvino(size: Sizes, precision: str, folder: Path) -> tuple[object, Generate]:
    import openvino

    import openvino_models as made

    model = made.of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).eval())
    hint = {"INFERENCE_PRECISION_HINT": precision}
    compiled = openvino.Core().compile_model(model, "CPU", hint)

    def generate(tokens: int) -> None:
        for ids in map(list, TEXTS):
            for _ in range(tokens):
                logits = compiled({"input_ids": [ids], "attention_mask": [[1] * len(ids)]})[0]
                ids.append(int(logits[0, -1].argmax()))

    return (compiled, model), generate


# with their precisions
ENGINES = {"vllm": (vllm, "bfloat16"), "llamacpp": (llamacpp, "f32"), "openvino": (openvino, "f32")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", help="a dtype of torch, a file type of GGUF, a hint")
    parser.add_argument("--apis", help="the nodes that are recorded; !* for none", default=())
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    given = parser.parse_args()
    make, usual = ENGINES[given.engine]
    with tempfile.TemporaryDirectory() as folder:
        engine, generate = make(
            sizes(given.layers, given.hidden), given.precision or usual, Path(folder)
        )
        print("| task | plain | recorded | ratio |\n| --- | --- | --- | --- |")
        for task, tokens in (("prompts", 1), (f"prompts and {OUTPUT} tokens", OUTPUT)):
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(given.rounds + 1):
                for recorded in (False, True):
                    place = Path(folder, f"{number}-{tokens}") if recorded else None
                    took = measured(engine, generate, tokens, place, given.apis)
                    if number:  # the first round warms up
                        times[recorded].append(took)
            plain, with_run = (statistics.median(times[kind]) for kind in (False, True))
            cells = spread(times[False]), spread(times[True]), f"{with_run / plain:.2f} ×"
            print(f"| {task} | {' | '.join(cells)} |")


def spread(seconds: list[float]) -> str:
    """Return the median, the least and the greatest as text."""
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return f"{middle * 1e3:,.0f} ms ({low * 1e3:,.0f}–{high * 1e3:,.0f})"


def measured(
    engine: object, generate: Generate, tokens: int, folder: Path | None, apis: str | tuple[()]
) -> float:
    """Return the seconds that generating takes. ``folder``: of a recording; None: without one."""
    if folder is None:
        start = time.perf_counter()
        generate(tokens)
        return time.perf_counter() - start
    with ld.dump(engine, name="cost", path=folder, tokens="all", stats_only=True, apis=apis):
        start = time.perf_counter()
        generate(tokens)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
