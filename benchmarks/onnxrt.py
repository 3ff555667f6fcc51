"""What recording a session of ONNX Runtime costs, as ratios to the session alone: a Markdown table.

    python benchmarks/onnxrt.py [--rounds N] [--hidden 512] [--layers 8] [--tokens 128]

One round runs each variant once, in turn, in one process and one thread. Each figure is the median
of the rounds' ratios. All variants are runs of one exported Llama on one prompt, in float32; the
first rounds are dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable

import onnxruntime as ort
import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld

logging.set_verbosity_error()
WARM = 3


def exported(hidden: int, layers: int, ids: torch.Tensor, folder: str) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    program = torch.onnx.export(
        model, (), kwargs={"input_ids": ids, "use_cache": False}, dynamo=True, verbose=False
    )
    program.save(f"{folder}/model.onnx")
    return f"{folder}/model.onnx"


def session(path: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rounds", 12), ("hidden", 512), ("layers", 8), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(3, 1000, (1, args.tokens))
    feed = {"input_ids": ids.numpy()}
    with tempfile.TemporaryDirectory() as folder:
        path = exported(args.hidden, args.layers, ids, folder)
        plain = session(path)
        variants: dict[str, Callable[[], object]] = {"ONNX Runtime": lambda: plain.run(None, feed)}
        kept: dict[str, dict[str, object]] = {
            "recorded, step not asked for": {"tokens": "1000000"},
            "statistics of modules and nodes, outputs": {
                "tokens": "all",
                "part": "out",
                "stats_only": True,
            },
            "statistics of modules and nodes, inputs and outputs": {
                "tokens": "all",
                "stats_only": True,
            },
            "all tensors of modules and nodes": {"tokens": "all"},
        }
        recordings = []
        for name, options in kept.items():
            one = session(path)
            recordings.append(ld.dump(one, name=f"bench{len(recordings)}", path=folder, **options))
            recordings[-1].start()
            variants[name] = lambda one=one: one.run(None, feed)
        ratios: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(args.rounds + WARM):
            times = {}
            for name, run in variants.items():
                begun = time.perf_counter()
                run()
                times[name] = time.perf_counter() - begun
            if number >= WARM:
                for name, took in times.items():
                    ratios[name].append(
                        took / times["ONNX Runtime"] if name != "ONNX Runtime" else took
                    )
        print("| | ratio |\n| --- | --- |")
        for name, found in ratios.items():
            middle = statistics.median(found)
            is_base = name == "ONNX Runtime"
            print(f"| {name} | {f'{1000 * middle:.0f} ms' if is_base else f'×{middle:.2f}'} |")
        for recording in recordings:
            with contextlib.suppress(
                ld.errors.EmptyDumpError
            ):  # the one of which no step was asked for
                recording.stop()


if __name__ == "__main__":
    main()
