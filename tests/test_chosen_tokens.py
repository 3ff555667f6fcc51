"""An error changes which tokens are chosen: later steps, whose input differs, are no cause."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmdebug_nb as ld

HIDDEN, WORDS = 24, 97


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x):
        return x + self.down(F.softplus(self.up(self.norm(x))))


class Golden(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Port(nn.Module):
    """The same, written otherwise: one module, and other operators. ``wrong``: has an error."""

    def __init__(self, golden, wrong):
        super().__init__()
        self.w = nn.ParameterDict(
            {name.replace(".", "_"): p.detach().clone() for name, p in golden.named_parameters()}
        )
        self.wrong = wrong

    def part(self, x, i):
        w = {
            name.split("_", 2)[2]: p for name, p in self.w.items() if name.startswith(f"blocks_{i}")
        }
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w["norm_weight"]
        y = torch.addmm(w["up_bias"], y.reshape(-1, HIDDEN), w["up_weight"].T)
        y = torch.relu(2 * y) if self.wrong and i == 1 else F.softplus(y)
        y = torch.addmm(w["down_bias"], y, w["down_weight"].T)
        return torch.add(x, y.view_as(x))

    def forward(self, ids):
        x = self.w["embed_weight"][ids]
        for i in range(3):
            x = self.part(x, i)
        return F.linear(x, self.w["head_weight"], self.w["head_bias"])


def generated(model, name, ids):
    with ld.dump(model, name=name, mode=("module", "api"), tokens="all") as run, torch.no_grad():
        for _ in range(4):
            ids = model(ids)[:, -1:].argmax(-1)
    return run


@pytest.mark.parametrize("seed", range(4))
def test_the_step_that_chose_other_tokens_is_blamed(seed):
    torch.manual_seed(seed)
    golden = Golden()
    for p in golden.parameters():
        p.data.normal_(0, 0.8)
    ids = torch.randint(WORDS, (2, 7))
    one = generated(golden, "golden", ids)
    right = ld.compare(one, generated(Port(golden, False), "right", ids), progress=False)
    assert right.verdict in ("match", "within_noise")
    report = ld.compare(one, generated(Port(golden, True), "wrong", ids), progress=False)
    assert report.verdict == "diverged"
    chosen = [d for d in report.differences if d.site.path == "" and d.site.role == "input"]
    assert any(d.verdict == "diverged" for d in chosen)  # else the case shows nothing
    assert {finding.step for finding in report.findings} == {0}
    lines = [finding.mine.code for finding in report.findings if finding.mine is not None]
    assert "relu" in lines[0]


def test_other_tokens_that_are_given_are_blamed():
    torch.manual_seed(0)
    golden, ids = Golden(), torch.randint(WORDS, (2, 7))
    one = generated(golden, "golden", ids)
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % WORDS
    report = ld.compare(one, generated(golden, "mine", other), progress=False)
    assert report.findings[0].cause == "wrong input"
    assert report.findings[0].step == 0
