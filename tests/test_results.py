"""What a program gives is compared, wherever and under whatever name the other program gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.results import ResultMatches
from llmdebug_nb.core.records import Record, Site, Summary
from recordings import AGREED, record

WIDTH = 16


class Block(nn.Module):
    def __init__(self, wrong=1.0):
        super().__init__()
        self.fc, self.wrong = nn.Linear(WIDTH, WIDTH), wrong

    def forward(self, x):
        return x + self.wrong * torch.tanh(self.fc(x))


class Golden(nn.Module):
    """Gives the last hidden state, and its logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"last": x, "logits": self.head(x)}


class AllStates(nn.Module):
    """Gives every state, in a list of another name, and no logits."""

    def __init__(self, wrong):
        super().__init__()
        golden = Golden()
        self.layers = nn.ModuleList(Block(wrong if n == 1 else 1.0) for n in range(3))
        self.layers.load_state_dict(golden.blocks.state_dict())

    def forward(self, x):
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return {"states": states}


class Apart(nn.Module):
    """Is called part by part; nothing calls the whole."""

    def __init__(self, wrong):
        super().__init__()
        golden = Golden()
        self.body = nn.Sequential(*(Block(wrong if n == 1 else 1.0) for n in range(3)))
        self.body.load_state_dict(golden.blocks.state_dict())
        self.out = golden.head


def given(seed=1):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def compared(model, work, mode="module"):
    golden = Golden()
    runs = [
        record(golden, lambda: golden(given()), "golden", mode=mode, weights=True),
        record(model, work, "mine", mode=mode, weights=True),
    ]
    return ld.compare(*runs)


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("wrong", [1.0, 0.5])
def test_a_state_under_another_name_is_the_result(mode, wrong):
    model = AllStates(wrong)
    report = compared(model, lambda: model(given()), mode)
    assert (report.verdict in AGREED) == (wrong == 1.0)
    assert ["layers.1" in str(f.mine and f.mine.path) for f in report.findings[:1]] == [True] * (
        wrong != 1.0
    )


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("wrong", [1.0, 0.5])
def test_the_parts_of_a_program_give_the_results_of_the_whole(mode, wrong):
    model = Apart(wrong)
    report = compared(model, lambda: model.out(model.body(given())), mode)
    assert (report.verdict in AGREED) == (wrong == 1.0)
    assert ["body.1" in str(f.mine and f.mine.path) for f in report.findings[:1]] == [True] * (
        wrong != 1.0
    )


def _given_by(path: str, number: int, fingerprint: str) -> Record:
    summary = Summary("float32", (2, 3), 0.0, 1.0, 0.5, 2.0, 0, 0, 0, fingerprint)
    return Record(number, Site(path), number, "Linear", summary)


@pytest.mark.parametrize(("root", "partner"), [("more", "more"), (None, "out")])
def test_what_mine_computes_inside_is_no_answer_to_a_result(root, partner):
    """Golden hands on what its head gives; mine's head is inside if something is around it."""
    head, whole = _given_by("head", 0, "xxh3:a"), _given_by("", 1, "xxh3:a")
    out = _given_by("more.out" if root else "out", 0, "xxh3:b")
    mine = [out, *([_given_by("more", 1, "xxh3:c")] if root else [])]
    mine = [replace(record, producer=0) for record in mine]  # in the order of execution
    pairs = [Pair(head, out, "same place")]
    ((golden, found),) = ResultMatches().match(([head, whole], mine), pairs)
    assert golden is whole
    assert found.site.path == partner


class Scores(nn.Module):
    """Shares golden's blocks, and gives something else."""

    def __init__(self):
        super().__init__()
        self.blocks = Golden().blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"scores": x.square().sum(dim=-1)[:, None].expand(-1, 3).contiguous()}


def test_results_that_cannot_be_compared_are_no_agreement():
    """All blocks agree, and none of that is what the programs give."""
    model = Scores()
    golden = Golden()
    golden.forward = lambda x: golden.head(golden.blocks[2](golden.blocks[1](golden.blocks[0](x))))
    runs = [
        record(golden, lambda: golden(given()), "golden", mode="module"),
        record(model, lambda: model(given()), "mine", mode="module"),
    ]
    report = ld.compare(*runs)
    assert report.verdict == "incomparable"
    assert "no result of golden belongs to a result of mine" in report.incomparable
