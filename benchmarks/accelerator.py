"""What recording costs on an accelerator, as ratios to the same program without it.

    python benchmarks/accelerator.py [--device cuda] [--size 1B] [--batch 1 8] [--rounds N]

The model generates: a prompt of 128 tokens, and 16 tokens more, in bfloat16. Or it trains: four
steps with SGD, of 128 tokens. One round runs every variant once, in turn, in one process; each
figure is the median of the rounds' ratios. The device has finished when a clock is read.
``us a call``: what a call of a module takes longer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import capture
import torch
from capture import Row, Variant
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "S": dict(capture.SIZES["S"], num_key_value_heads=8),
    "1B": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
PROMPT, DECODE, STEPS = 128, 16, 4


def build(size: str, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=512, eos_token_id=None, pad_token_id=0
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def generate(model: LlamaForCausalLM, batch: int) -> None:
    device = model.device
    ids = torch.arange(batch * PROMPT, device=device).reshape(batch, PROMPT) % 1000 + 3
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=DECODE, do_sample=False)
    wait_for(device)


def train(model: LlamaForCausalLM, batch: int) -> None:
    ids = torch.arange(batch * PROMPT, device=model.device).reshape(batch, PROMPT) % 1000 + 3
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wait_for(model.device)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def variants(model: LlamaForCausalLM, batch: int, folder: Path) -> list[Variant]:
    work, base = partial(generate, model, batch), "uninstrumented"
    training, training_base = partial(train, model, batch), "training, uninstrumented"
    gradients = "training, statistics with gradients, module"

    def recording(**options: object) -> capture.Run:
        return partial(capture.recorded, model, folder, options)

    figures = {"stats_only": True, "tokens": "all"}
    return [
        Variant(base, work, capture.plain),
        Variant("empty hooks (floor)", work, partial(capture.empty_hooks, model), base),
        Variant("statistics, module", work, recording(**figures), base),
        Variant("statistics, module+aten", work, recording(mode="module+aten", **figures), base),
        Variant("statistics, api", work, recording(mode="api", **figures), base),
        Variant("tensors of tokens 0-3, module", work, recording(tokens="0-3"), base),
        Variant(training_base, training, capture.plain),
        Variant(gradients, training, recording(**figures), training_base),
    ]


def show(rows: list[Row], modules: int) -> None:
    print("|variant|while recording|with start and stop|lowest–highest|ms|us a call|")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if row.name.endswith("uninstrumented"):
            base = statistics.median(row.seconds)
            calls = modules * (STEPS if row.name.startswith("training") else DECODE)
        inside, whole = statistics.median(row.recording), statistics.median(row.whole)
        longer = 1e6 * (inside - 1) * base / calls
        spread = f"{min(row.recording):.2f}–{max(row.recording):.2f}"
        shown = "" if math.isnan(longer) else f"{longer:.0f}"
        milliseconds = 1e3 * statistics.median(row.seconds)
        print(f"|{row.name}|{inside:.2f}|{whole:.2f}|{spread}|{milliseconds:.0f}|{shown}|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = build(args.size, args.device)
    modules = sum(1 for _ in model.modules())
    on_cuda = args.device.startswith("cuda")
    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    for batch in args.batch:
        with tempfile.TemporaryDirectory() as folder:
            rows = capture.measure(
                variants(model, batch, Path(folder) / "runs"), Path(folder) / "runs", args.rounds
            )
        facts = name, args.size, f"batch {batch}", f"torch {torch.__version__}"
        print(f"\n{'; '.join(facts)}; {args.rounds} rounds\n")
        show(rows, modules)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
