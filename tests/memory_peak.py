"""Print the peak memory of a training step as JSON; with a folder, record all tensors there."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import llmdebug_nb as ld
from models import llama

sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 1024}
model = llama(**sizes, max_position_embeddings=512).train()
ids = torch.randint(3, 1000, (2, 512), generator=torch.Generator().manual_seed(0))


def step() -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


# what is loaded and allocated once is there
step()
linear = torch.nn.Linear(2, 2)
with tempfile.TemporaryDirectory() as folder, ld.dump(linear, path=folder, mode="module+aten"):
    linear(torch.ones(1, 2)).sum().backward()
found = {"kept": 0, "largest": 0}
if sys.argv[1:]:
    with ld.dump(model, name="r", path=sys.argv[1], mode="module+aten") as run:
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shapes = run.to_pandas()["shape"]
    found = {
        "kept": run.info()["bytes"],
        "largest": max(torch.Size(shape).numel() for shape in shapes) * 4,
    }
else:
    step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({**found, "peak": peak * 1024}))
