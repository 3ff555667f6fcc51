"""What a training run does otherwise is named: gradients, the loss, the optimizer's step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import llmdebug_nb as ld

WORDS, WIDTH, STEPS = 50, 32, 3
MODES = ["module", "module+api"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.hidden(x)))

    def hidden(self, x):
        return self.up(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def train(tmp_path):
    torch.manual_seed(0)
    model = Net()
    ids, labels = torch.randint(WORDS, (2, 2, 12))

    def run(name, mode, change=lambda model: None, factor=1.0, reduction="mean", **options):
        mine = copy.deepcopy(model)
        change(mine)
        optimizer = torch.optim.AdamW(mine.parameters(), **{"lr": 1e-3, **options})
        with ld.dump(mine, name=name, path=tmp_path, mode=mode) as recorded:
            for _ in range(STEPS):
                optimizer.zero_grad()
                logits = mine(ids).flatten(0, 1)
                loss = functional.cross_entropy(logits, labels.flatten(), reduction=reduction)
                (loss if factor == 1.0 else loss * factor).backward()
                optimizer.step()
        return recorded

    return run


def compared(train, mode, **mine):
    return ld.compare(train("golden", mode), train("mine", mode, **mine))


def without_gradient(model):
    layer = model.layers[1]
    layer.hidden = lambda x: layer.up(layer.norm(x)).detach()


def frozen(model):
    model.layers[1].up.weight.requires_grad_(False)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_the_backward_pass_does_not_reach_are_the_one_finding(train, mode):
    report = compared(train, mode, change=without_gradient)
    (finding,) = report.findings
    assert report.headlines()[0].where == "layers.1.down (Linear) in the backward pass"
    assert (finding.cause, finding.path, finding.step) == ("missing gradient", "layers.1.down", 0)
    assert "have a gradient in golden and none in mine" in finding.evidence
    for name in ("up.bias", "up.weight", "norm.weight"):
        assert f"layers.1.{name}" in finding.evidence


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_one_program_does_not_train_is_the_one_finding(train, mode):
    report = compared(train, mode, change=frozen)
    (finding,) = report.findings
    assert report.verdict == "diverged"
    assert (finding.cause, finding.step) == ("weight not trained", 0)
    assert finding.evidence.startswith("layers.1.up.weight has a gradient in golden and none in")


@pytest.mark.parametrize("mode", MODES)
def test_it_is_told_which_program_lacks_a_gradient(train, mode):
    report = ld.compare(train("frozen", mode, change=frozen), train("trained", mode))
    assert "has a gradient in mine and none in golden" in report.findings[0].evidence


def test_a_missing_gradient_is_told_though_no_weight_has_changed(train):
    report = compared(train, "module", change=frozen, lr=0.0)
    assert [each.cause for each in report.findings][:1] == ["weight not trained"]


@pytest.mark.parametrize(
    ("mine", "factor"), [({"factor": 4096.0}, 4096), ({"factor": 0.5}, 0.5),
                         ({"reduction": "sum"}, 24)],
)  # fmt: skip
def test_a_factor_of_the_loss_enters_with_the_gradient(train, mine, factor):
    (finding,) = compared(train, "module", **mine).findings
    assert (finding.cause, finding.path, finding.step) == ("wrong input: gradient", "", 0)
    assert finding.relation == f"mine is golden's value times {factor}"


def test_with_functions_the_loss_itself_is_named(train):
    (finding,) = compared(train, "module+api", reduction="sum").findings
    assert "reduction is mean in golden and sum in mine" in finding.evidence


@pytest.mark.parametrize("mode", MODES)
def test_another_learning_rate_is_told_by_its_ratio(train, mode):
    (finding,) = compared(train, mode, lr=2e-3).findings
    assert (finding.cause, finding.step) == ("weight changed otherwise", 1)
    assert "in all weights, its change is 2 times golden's" in finding.evidence


@pytest.mark.parametrize("mode", MODES)
def test_another_weight_decay_is_told_by_what_it_takes(train, mode):
    (finding,) = compared(train, mode, weight_decay=0.11).findings  # golden's is 0.01
    taken = 1e-3 * (0.11 - 0.01)
    assert f"its change is golden's minus {taken:.2g} times the weight" in finding.evidence


@pytest.mark.parametrize("mode", MODES)
def test_another_optimizer_is_one_finding_without_a_ratio(train, mode):
    (finding,) = compared(train, mode, eps=1e-3).findings
    assert finding.cause == "weight changed otherwise"
    assert "times golden's" not in finding.evidence


@pytest.mark.parametrize("mode", MODES)
def test_a_right_training_has_no_finding(train, mode):
    assert compared(train, mode).verdict == "match"


def test_the_line_that_changes_the_loss_is_named(train):
    (finding,) = compared(train, "module+api", factor=4096.0).findings
    assert finding.op == "Tensor.mul"
    assert "loss * factor" in (finding.mine.code or "")


class WithLoss(Net):
    """A model that computes the loss itself, over all places, of which some do not count."""

    def forward(self, ids, labels=None):
        logits = super().forward(ids)
        if labels is None:
            return {"logits": logits}
        following = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        return {"loss": loss, "logits": logits}


IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])


def inside(model):
    model(IDS, IDS.masked_fill(IDS == 0, -100))["loss"].backward()


def outside(model, **given):
    logits = model(IDS)["logits"][:, :-1].flatten(0, 1)
    functional.cross_entropy(logits, IDS[:, 1:].flatten(), **given).backward()


def by_hand(model):
    logits, following = model(IDS)["logits"][:, :-1], IDS[:, 1:]
    of_each = -logits.log_softmax(-1).gather(-1, following[..., None])[..., 0]
    (of_each * (following != 0)).sum().div((following != 0).sum()).backward()


@pytest.fixture
def losses(tmp_path):
    def run(work, name, mode, **given):
        torch.manual_seed(0)
        model = WithLoss()
        with ld.dump(model, name=name, path=tmp_path, mode=mode) as recorded:
            work(model, **given)
        return recorded

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("right", [lambda m: outside(m, ignore_index=0), by_hand])
def test_a_right_loss_outside_of_the_model_agrees_with_one_inside(losses, mode, right):
    report = ld.compare(losses(inside, "golden", mode), losses(right, "mine", mode))
    assert report.verdict in ("match", "within_noise")
    assert not report.findings


def test_a_loss_that_counts_padding_enters_with_the_gradient(losses):
    golden, mine = losses(inside, "golden", "module"), losses(outside, "mine", "module")
    (finding,) = ld.compare(golden, mine).findings
    assert finding.cause == "wrong input: gradient"


def test_a_loss_written_otherwise_with_functions_enters_with_the_gradient(losses):
    def twice(model):
        logits, following = model(IDS)["logits"][:, :-1], IDS[:, 1:]
        of_each = -logits.log_softmax(-1).gather(-1, following[..., None])
        (of_each.mean() * 2).backward()

    golden, mine = losses(outside, "golden", "module+api"), losses(twice, "mine", "module+api")
    finding = ld.compare(golden, mine).findings[0]
    assert finding.cause == "wrong input: gradient"
    assert finding.relation == "mine is golden's value times 2"
