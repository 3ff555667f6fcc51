"""A cause is the smallest change of mine that gives golden's result; what does no harm is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.causes import causes
from recordings import AGREED, compared, recorded

WIDTH, HEADS, TOKENS = 24, 4, 7
SIZE = WIDTH // HEADS
MODES = ("module", "module+api")


def turned(x):
    angles = torch.arange(x.shape[-2])[:, None] * 0.5 ** torch.arange(SIZE // 2)
    first, second = x.chunk(2, -1)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


class Attention(nn.Module):
    """``turns``: rotates queries and keys."""

    def __init__(self, turns=True):
        super().__init__()
        self.turns = turns
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * SIZE) for n in (HEADS, 2, 2))
        self.norm, self.out = nn.RMSNorm(SIZE, eps=1e-5), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = self.norm(q)
        return (turned(q), turned(k), v) if self.turns else (q, k, v)

    def forward(self, x, keep=None):
        q, k, v = self.heads(x)
        mask = None if keep is None else keep[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=SIZE**-0.5, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, make=Attention):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make(at) for at in range(3))
        self.head = nn.Linear(WIDTH, 8)
        for name, weight in self.named_parameters():
            if "norm" in name:
                nn.init.uniform_(weight, 0.5, 1.5)

    def forward(self, x, keep=None):
        for layer in self.layers:
            x = x + layer(x, keep)
        return self.head(x)


def golden():
    return Model(lambda at: Attention(at < 2))


class Port(Attention):
    """The same in other words: heads are repeated, the mask is made, the scale is the default."""

    def repeated(self, x):
        return x.repeat_interleave(2, 1)

    def forward(self, x, keep=None):
        q, k, v = self.heads(x)
        k, v = self.repeated(k), self.repeated(v)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        mask = mask if keep is None else mask & keep[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Tiled(Port):
    def repeated(self, x):
        return x.repeat(1, 2, 1, 1)


class Reordered(Port):
    """Keeps the channels of a head in another order, in queries and keys alike."""

    scale = SIZE**-0.5

    def forward(self, x, keep=None):
        q, k, v = self.heads(x)
        q, k = (torch.cat((y[..., 1::2], y[..., ::2]), -1) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class OtherScale(Reordered):
    scale = 0.7


def report_of(mine, mode="module+api", theirs=None, inputs=None):
    """Compare golden with a port, and keep the models: they are run again."""
    models = theirs or golden(), mine
    given = inputs or (torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)),)
    report = compared(*models, *given, mode=mode)
    report.models = models
    return report


def test_settings_that_do_no_harm_are_no_cause_and_the_extra_call_has_siblings():
    assert report_of(Model(lambda at: Port(at < 2))).verdict in AGREED
    finding = report_of(Model(lambda at: Port())).findings[0]
    assert "cosines" in finding.mine.code
    assert finding.cause == causes.OTHER_OPS
    assert "Golden does so too in layers.0, layers.1, but not here" in finding.evidence


def test_a_wrong_number_is_named_behind_an_order_that_does_no_harm():
    assert report_of(Model(lambda at: Reordered(at < 2))).verdict in AGREED
    finding = report_of(Model(lambda at: OtherScale(at < 2))).findings[0]
    assert finding.cause == causes.SCALAR
    assert "self.scale" in finding.mine.code
    assert "takes 0.7 in mine" in finding.evidence


def test_heads_that_are_repeated_in_the_other_way_blame_the_line_that_repeats_them():
    finding = report_of(Model(lambda at: Tiled(at < 2))).findings[0]
    assert "x.repeat(1, 2, 1, 1)" in finding.mine.code
    assert "repeated as a whole" in finding.relation


KEEP = torch.tensor([[True] * TOKENS, [True] * 4 + [False] * (TOKENS - 4)])


@pytest.mark.parametrize("mode", MODES)
def test_an_argument_that_the_model_lacks_is_told_first(mode):
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    models = golden(), Model(lambda at: Port(at < 2))
    with torch.no_grad():
        with ld.dump(models[0], name="golden", mode=mode) as one:
            models[0](x, keep=KEEP)
        with ld.dump(models[1], name="mine", mode=mode) as other:
            models[1](x)
    finding = ld.compare(one, other).findings[0]
    assert finding.path == ""
    assert "keep is given to the model in golden alone" in finding.evidence
    assert "with it mine's result is golden's" in finding.evidence
    assert finding.golden is not None


def test_an_argument_that_says_what_is_usual_is_not_blamed():
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = golden()
        with ld.dump(theirs, name="golden", mode="module+api") as one:
            theirs(x, keep=torch.ones(2, TOKENS, dtype=torch.bool))
        mine = Model(lambda at: Port())
        with ld.dump(mine, name="mine", mode="module+api") as other:
            mine(x)
    finding = ld.compare(one, other).findings[0]
    assert "cosines" in finding.mine.code


class Near(Port):
    """Sees the last three tokens alone."""

    def forward(self, x, keep=None):
        q, k, v = self.heads(x)
        places = torch.arange(TOKENS)
        near = (places[:, None] - places) < 3
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=near, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_mask_that_mine_alone_takes_blames_the_line_that_makes_it():
    finding = report_of(Model(lambda at: Near(at < 2))).findings[0]
    assert "near = " in finding.mine.code
    assert finding.cause == causes.WRONG_MASK
    assert "takes attn_mask in mine alone" in finding.evidence


class Forgotten(Attention):
    def heads(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return (turned(q), turned(k), v) if self.turns else (q, k, v)


class InWords(Attention):
    """Uses the weight of a module that it does not call. ``wrong``: and turns too often."""

    def heads(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = F.rms_norm(q, (SIZE,), self.norm.weight, 1e-5)
        return (turned(q), turned(k), v) if self.turns else (q, k, v)


@pytest.mark.parametrize("mode", MODES)
def test_a_module_that_mine_has_and_never_calls_is_named(mode):
    finding = report_of(Model(lambda at: Forgotten(at < 2)), mode).findings[0]
    assert finding.path == "layers.0.norm"
    assert "never calls it, and without it golden's result is mine's" in finding.evidence
    assert finding.mine.lacks


@pytest.mark.parametrize("mode", MODES)
def test_a_module_whose_weight_is_used_without_it_is_not_missing(mode):
    assert report_of(Model(lambda at: InWords(at < 2)), mode).verdict in AGREED
    finding = report_of(Model(lambda at: InWords()), mode).findings[0]
    assert "never calls" not in finding.evidence


class Eps(Attention):
    def __init__(self, turns=True):
        super().__init__(turns)
        self.norm = OtherNorm()


class OtherNorm(nn.Module):
    def __init__(self, epsilon=0.1):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(SIZE)), epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


def test_the_epsilon_of_another_class_is_named_by_modules_and_tried():
    mine = Model(lambda at: Eps(at < 2))
    mine.load_state_dict(golden().state_dict())
    finding = report_of(mine, "module").findings[0]
    assert finding.cause == causes.SCALAR
    assert "eps (epsilon in mine) is 1e-05 in golden and 0.1 in mine" in finding.evidence
    assert "with golden's value it gives golden's result" in finding.evidence


class Cut(Attention):
    def forward(self, x, keep=None):
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, scale=SIZE**-0.5, enable_gqa=True)
        return self.out(y.detach().transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_cut_off_is_told_as_such(mode):
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    runs = []
    for name, model in (
        ("golden", golden()),
        ("mine", Model(lambda at: (Cut if at == 1 else Attention)(at < 2))),
    ):
        with ld.dump(model, name=name, mode=mode) as run:
            model(x).sum().backward()
        runs.append(run)
    finding = ld.compare(*runs).findings[0]
    assert (finding.cause, finding.path) == (causes.GRADIENT, "layers.1.out")


class Seeing(nn.Module):
    def forward(self, x):
        scores = 0.1 * x @ x.transpose(-1, -2)
        return torch.softmax(scores, -1) @ x


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.see = nn.Embedding(40, WIDTH), Seeing()
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, input_ids):
        return self.head(self.see(self.table(input_ids)))


def test_what_a_call_takes_beyond_goldens_tokens_is_told():
    model = Reading()
    first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[21, 22, 23, 24]])
    one = recorded(model, second, name="alone", mode="module+api")
    other = recorded(model, torch.cat((first, second), 1), name="packed", mode="module+api")
    finding = ld.compare(one, other).findings[0]
    assert "takes more in mine: input 0 is 1x7x7 there and 1x4x4 in golden" in finding.evidence
    assert "identical" not in finding.evidence


def test_a_finding_and_its_listing_name_one_line():
    for mine in (Model(lambda at: Port()), Model(lambda at: OtherScale(at < 2))):
        report = report_of(mine)
        finding = report.findings[0]
        listing = report.listing(finding)
        assert listing.lines[listing.at].mine_line == finding.mine.line
