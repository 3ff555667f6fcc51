"""A port with an expected deviation: it hides no bug behind it, and no bug beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from ports import score
from ports.entry import Bug
from ports.sets import PORTS

INFINITE = Bug(
    "infinite",
    "one channel is divided by zero",
    old="self.down(F.silu(gate) * up)",
    new="self.down(F.silu(gate) * up / torch.ones(up.shape[-1]).index_fill(0, torch.tensor(3), 0))",
    modules=("model.layers.2", "model.layers.2.mlp", "model.layers.2.down"),
)
LAYER = ("model.layers.1.mlp.down_proj.weight", [("model.layers.1", None)])
# the inputs of all layers and of all that is inside them
ENGINE = ("embed.weight", [("model.embed_tokens", None), ("model.layers.*", "input")])
GPT = ("blocks.0.up.weight", [("blocks.0", None), ("transformer.h.0", None)])
CASES = [
    ("layer", "modules", LAYER, [None, "gate_up", "turn_sign", "no_residual", INFINITE]),
    ("layer", "functions", LAYER, [None, "gate_up", "turn_sign", INFINITE]),
    ("engine", "modules", ENGINE,
     [None, "gate_for_up", "decode_position", "positions_for_slots", "stale_residual"]),
    ("gptlike", "modules", GPT, [None, "place_repeated", "cache_reversed"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode", "deviation", "bug"),
    [
        pytest.param(name, mode, deviation, bug, id=f"{name}-{mode}-{getattr(bug, 'name', bug)}")
        for name, mode, deviation, bugs in CASES
        for bug in bugs
    ],
)
def test_behind_an_expected_deviation_a_bug_is_still_found(tmp_path, name, mode, deviation, bug):
    """The deviation: a weight that is rounded otherwise, by one part in a thousand."""
    port, (weight, marks) = PORTS[name], deviation
    if isinstance(bug, str):
        bug = port.bug(bug)
    program = port.golden()
    mine = port.mine(program, bug)
    with torch.no_grad():
        rounded = dict(mine.model.named_parameters())[weight]
        noise = torch.randn(rounded.shape, generator=torch.Generator().manual_seed(7))
        rounded.add_(1e-3 * rounded.norm() / noise.norm() * noise)
    golden, _ = score.record(program, tmp_path / "golden", mode)
    run, _ = score.record(mine, tmp_path / "mine", mode)
    report = ld.compare(golden, run, progress=False)
    assert report.verdict == "diverged"
    for path, role in marks:
        report.expect(path, "rounded otherwise", role=role)
    unexpected = [finding for finding in report.findings if finding.expected is None]
    if bug is None:
        assert (report.verdict, unexpected) == ("expected", [])
        return
    assert report.verdict == "diverged"
    answer = score.Answer(bug, port.file(bug), bug.lines(port.text))
    seen = [score.named(finding) for finding in unexpected[:1]]
    assert answer.grade(seen, mode) in ("exact", "module"), seen[0].text
