"""Alignment of real models and of tensor layouts.

The models are renamed, wrapped, fused, batched, padded, or have other operators.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
import reimplemented
from llmdebug_nb.align import pairing
from llmdebug_nb.align.matches import ValueMatches
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.align.sequence import MatchTolerance
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site
from models import gpt2, llama, prompt
from recordings import AGREED, compared


def _run(name, model, *args, mode="module", weights=False, **kwargs):
    with ld.dump(model, name=name, mode=mode, weights=weights) as run, torch.no_grad():
        model(*args, **kwargs)
    return run


def _paired(report):
    """Return the rows of two tensors in the same place: not those of a value seen elsewhere."""
    both = [d for d in report.differences if d.pair.golden and d.pair.mine]
    return [d for d in both if not d.pair.elsewhere]


def _partners(report):
    """Return the pairs of (path, role, slot), golden first; an operator's path has its call."""

    def site(record):
        s = record.site
        return f"{s.path}#{s.call}" if "/" in s.path else s.path, s.role, s.slot

    return {(site(d.pair.golden), site(d.pair.mine)) for d in _paired(report)}


def _alone(report, side):
    return {
        d.site.path
        for d in report.differences
        if d.verdict == "unmatched" and getattr(d.pair, side)
    }


def _modules(pairs):
    return {(g[0], m[0]) for g, m in pairs if "/" not in g[0]}


# --- module trees ------------------------------------------------------------------------------

GPT = {
    "transformer.wte": ["tokens"], "transformer.wpe": ["positions"], "transformer.ln_f": ["final"],
        "lm_head": ["head"], "": [""],
} | {
    f"transformer.h.{i}{theirs}": [f"blocks.{i}{x}" for x in ours]
    for i in (0, 1)
    for theirs, ours in {
        "": [""], ".ln_1": [".norm1"], ".ln_2": [".norm2"], ".attn": [".attention"],
            ".attn.c_proj": [".attention.wo"],
        ".attn.c_attn": [".attention.wq", ".attention.wk", ".attention.wv"],
        ".mlp.c_fc": [".up"], ".mlp.act": [".gelu"], ".mlp.c_proj": [".down"],
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_gpt2_and_its_port_with_other_names_and_separate_projections_pair_module_by_module(
    mode, weights
):
    theirs = gpt2()
    ours = reimplemented.GPT(theirs)
    report = ld.compare(
        *(
            _run(n, m, prompt(), mode=mode, weights=weights)
            for n, m in (("golden", theirs), ("mine", ours))
        )
    )
    assert _modules(_partners(report)) == {(g, m) for g, all_m in GPT.items() for m in all_m}
    assert report.verdict in AGREED
    assert not any("attention" in path for path in _alone(report, "mine") if "/" not in path)


def test_fused_tensors_are_compared_part_by_part_and_the_part_is_named():
    theirs = gpt2()
    report = ld.compare(
        _run("golden", theirs, prompt()), _run("mine", reimplemented.GPT(theirs), prompt())
    )
    parts = {
        d.pair.mine.site.path: d
        for d in report.differences
        if d.site.path.endswith("h.0.attn.c_attn") and d.site.role == "output"
    }
    assert {path.rpartition(".")[2]: d.pair.fit.says for path, d in parts.items()} == {
        "wq": "0-31 of 96 along axis -1 of golden",
        "wk": "32-63 of 96 along axis -1 of golden",
        "wv": "64-95 of 96 along axis -1 of golden",
    }
    assert all(
        d.pair.why == "fused module: one in golden is 3 in mine" and d.verdict in AGREED
        for d in parts.values()
    )


def test_a_fused_projection_whose_heads_are_interleaved_is_seen_through():
    theirs = gpt2()
    golden = _run("golden", reimplemented.GPT(theirs), prompt(), weights=True)
    mine = _run(
        "mine", reimplemented.GPT(theirs, fused=True, interleaved=True), prompt(), weights=True
    )
    for report in (ld.compare(golden, mine), ld.compare(mine, golden)):
        assert {d.verdict for d in report.differences} <= AGREED
        says = {
            d.pair.fit.says for d in report.differences if d.pair.fit and d.site.role == "output"
        }
        assert len(says) == 3
        assert all(
            word.startswith(("0-7", "8-15", "16-23")) and "of each 24" in word for word in says
        )


@pytest.mark.parametrize("turned", [False, True])
def test_llama_and_its_port_with_fused_projections_pair_both_ways(turned):
    theirs = llama()
    runs = [
        _run("golden", theirs, prompt(), weights=True),
        _run("mine", reimplemented.Llama(theirs), prompt(), weights=True),
    ]
    report = ld.compare(*(runs[::-1] if turned else runs))
    assert report.verdict in AGREED
    pairs = {(m, g) if turned else (g, m) for g, m in _modules(_partners(report))}
    for i in (0, 1):
        layer = f"model.layers.{i}"
        assert {p for p in pairs if f"layers.{i}" in p[0]} == {
            (layer + a, f"layers.{i}" + b)
            for a, b in (
                ("", ""), (".input_layernorm", ".attention_norm"), (".post_attention_layernorm",
                    ".ffn_norm"),
                (".self_attn", ".attention"), (".mlp", ".feed_forward"), (".self_attn.o_proj",
                    ".attention.wo"),
                *((f".self_attn.{x}_proj", ".attention.wqkv") for x in "qkv"),
                *((f".mlp.{x}_proj", ".feed_forward.w13") for x in ("gate", "up")),
                    (".mlp.down_proj", ".feed_forward.w2"),
            )
        }  # fmt: skip


def test_a_wrong_weight_in_a_renamed_and_fused_port_is_blamed_on_the_part():
    theirs = llama()
    ours = reimplemented.Llama(theirs)
    with torch.no_grad():
        ours.layers[1].feed_forward.w13.weight[70] *= 1.5
    report = ld.compare(
        _run("golden", theirs, prompt(), weights=True), _run("mine", ours, prompt(), weights=True)
    )
    assert report.findings[0].path == "model.layers.1.mlp.up_proj"


class _Shards(nn.Module):
    """The two halves of a linear layer: each has half of the outputs, or half of the inputs."""

    def __init__(self, whole, by_inputs):
        super().__init__()
        self.by_inputs = by_inputs
        halves = whole.weight.detach().chunk(2, dim=int(by_inputs))
        self.rank = nn.ModuleList(nn.Linear(*half.shape[::-1], bias=False) for half in halves)
        for linear, half in zip(self.rank, halves, strict=True):
            linear.weight.data.copy_(half)

    def forward(self, x):
        if self.by_inputs:
            return sum(linear(part) for linear, part in zip(self.rank, x, strict=True))
        return [linear(x) for linear in self.rank]


class _Block(nn.Module):
    def __init__(self, whole=None):
        super().__init__()
        up, down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.up = up if whole is None else _Shards(whole.up, by_inputs=False)
        self.down = down if whole is None else _Shards(whole.down, by_inputs=True)
        if whole is not None:
            self.norm.load_state_dict(whole.norm.state_dict())

    def forward(self, x):
        y = self.up(self.norm(x))
        return x + self.down([p.relu() for p in y] if isinstance(y, list) else y.relu())


@pytest.mark.parametrize("turned", [False, True])
def test_layers_in_tensor_parallel_parts_pair_with_whole_ones(turned):
    golden = nn.Sequential(*(_Block() for _ in range(3)))
    ours = nn.Sequential(*map(_Block, golden))

    def compared():
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
        runs = [_run("golden", golden, x, weights=True), _run("mine", ours, x, weights=True)]
        return ld.compare(*(runs[::-1] if turned else runs))

    right = compared()
    assert right.verdict in AGREED
    assert not right.findings
    pairs = {(m, g) if turned else (g, m) for g, m in _modules(_partners(right))}
    assert {("1.down", "1.down"), ("1.up", "1.up.rank.1"), ("1.norm", "1.norm")} <= pairs
    with torch.no_grad():
        for linear in ours[1].down.rank:
            linear.weight.copy_(linear.weight.flip(1))
    wrong = compared()
    assert wrong.findings[0].path in ("1.down", "1.down.rank.0")
    assert wrong.findings[0].cause == "weight differs"


class _Sines(nn.Module):
    def forward(self, positions):
        return torch.outer(positions.float().flatten(), torch.ones(16)).sin()


class _Counting(nn.Module):
    """Counts positions itself, from the place of the first token on, and adds their sines."""

    def __init__(self):
        super().__init__()
        self.table, self.sines = nn.Embedding(40, 16), _Sines()

    def forward(self, ids, start):
        places = torch.arange(start, start + ids.shape[1])
        return self.table(ids) + self.sines(places[None])


class _Counted(nn.Module):
    """Takes positions beside the tokens."""

    def __init__(self, other):
        super().__init__()
        self.embed = other.table

    def forward(self, ids, positions):
        return self.embed(ids) + torch.outer(positions.float(), torch.ones(16)).sin()


def _decoded(name, model, count):
    """Return the run of a prompt of 6 tokens and 2 steps of one token each."""
    with ld.dump(model, name=name, tokens="all") as run, torch.no_grad():
        for start, end in ((0, 6), (6, 7), (7, 8)):
            model(torch.arange(3, 19).reshape(1, 16)[:, start:end], count(start, end))
    return run


class _Choosing(nn.Module):
    """Gives the places of the two best of four scores."""

    def __init__(self, dtype, offset):
        super().__init__()
        self._dtype, self._offset = dtype, offset

    def forward(self, scores):
        return ((scores.topk(2).indices + self._offset) % 4).to(self._dtype)


@pytest.mark.parametrize(("offset", "count"), [(0, 1), (1, 0)])
def test_equal_integers_of_two_dtypes_are_one_value(offset, count):
    scores = torch.randn(28, 4, generator=torch.Generator().manual_seed(0))
    golden = _run("golden", _Choosing(torch.int64, 0), scores)
    mine = _run("mine", _Choosing(torch.int32, offset), scores)
    sides = tuple(list(run.records(role="output")) for run in (golden, mine))
    layouts = LayoutFinder(sides, (golden.load, mine.load))
    found = ValueMatches(*sides, layouts, MatchTolerance()).of_golden(sides[0][0])
    assert [match.mine.summary.dtype for match in found] == ["int32"] * count


def test_positions_of_single_tokens_pair_as_those_of_the_prompt():
    theirs = _Counting()
    ours = _Counted(theirs)
    golden = _decoded("golden", theirs, lambda start, end: start)
    right = ld.compare(golden, _decoded("mine", ours, torch.arange))
    assert right.verdict in AGREED
    rows = [d for d in right.differences if d.pair.why == "same values in an earlier step"]
    assert [(d.site.path, d.site.step, d.verdict) for d in rows] == [
        ("sines", 1, "match"),
        ("sines", 2, "match"),
    ]
    off = _decoded("mine", ours, lambda start, end: torch.arange(start, end) + (start > 0))
    found = ld.compare(golden, off).findings[0]
    assert (found.path, found.step, found.cause) == ("sines", 1, "wrong input: position")


class _Ranging(nn.Module):
    """Makes positions from the place of the first token on."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.count = nn.Embedding(40, 16), count

    def forward(self, ids, start):
        places = self.count(start, ids.shape[1])
        return self.table(ids) + torch.outer(places.float(), torch.ones(16)).sin()


class _Whole(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.inner = _Ranging(count)

    def forward(self, ids, start):
        return self.inner(ids, start)


class _Offset(nn.Module):
    """The same in other code, in one module, which also counts the places that are taken."""

    def __init__(self, count):
        super().__init__()
        self.words, self.count = _Ranging(count).table, count
        self.taken = torch.zeros(40)

    def forward(self, ids, start):
        self.taken[self.count(start, ids.shape[1])] = 1
        ahead = self.count(start, ids.shape[1]).to(torch.float32)[:, None]
        return torch.sin(ahead.expand(-1, 16)).add(self.words(ids))


def _ranged(name, cls, count):
    model = cls(count)
    with ld.dump(model, name=name, tokens="all", mode="module+api") as run, torch.no_grad():
        for start, end in ((0, 6), (6, 7), (7, 8)):
            model(torch.arange(3, 19).reshape(1, 16)[:, start:end], start)
    return run


def _summed(start, n):
    return torch.arange(n) + start


def _begun(start, n):
    return torch.arange(start, start + n)


@pytest.mark.parametrize("cls", [_Whole, _Offset])
def test_a_range_that_begins_at_an_offset_is_golden_s_range_and_its_sum(cls):
    report = ld.compare(_ranged("golden", _Whole, _summed), _ranged("mine", cls, _begun))
    assert report.verdict in AGREED
    ranges = [d for d in report.differences if d.pair.mine and "arange" in d.pair.mine.op]
    assert {d.verdict for d in ranges if cls is _Offset} <= {"match"}
    assert len(ranges) >= 3


@pytest.mark.parametrize("cls", [_Whole, _Offset])
def test_a_range_that_begins_one_too_late_is_a_difference(cls):
    golden = _ranged("golden", _Whole, _summed)
    late = _ranged("mine", cls, lambda start, n: _begun(start + (start > 0), n))
    report = ld.compare(golden, late)
    assert (report.verdict, report.findings[0].step) == ("diverged", 1)


class _Slotted(nn.Module):
    """Writes to places of a cache by code that is no operator of torch."""

    def __init__(self, ahead):
        super().__init__()
        self.ahead, self.cache = ahead, torch.zeros(16, 4)

    def forward(self, x):
        slots = torch.arange(self.ahead, self.ahead + len(x))
        self.cache.numpy()[slots.numpy()] = x.numpy()
        return x * 2


class _Kept(nn.Module):
    """Keeps a mask for later."""

    def __init__(self, ahead):
        super().__init__()
        self.ahead = ahead

    def forward(self, x):
        self.mask = torch.ones(8, 8, dtype=torch.bool).tril(self.ahead)
        return x * 2


@pytest.mark.parametrize("cls", [_Slotted, _Kept])
def test_other_places_count_where_nothing_shows_what_is_made_of_them(cls):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert compared(cls(0), cls(0), x, mode="module+api").verdict == "match"
    report = compared(cls(0), cls(1), x, mode="module+api")
    assert (report.verdict, report.findings[0].cause) == ("diverged", "scalar argument differs")


class _Twice(nn.Module):
    """Gives a range to one module, and the range from an offset on to another one."""

    def __init__(self):
        super().__init__()
        self.near, self.far = _Sines(), _Sines()

    def forward(self, x, start):
        near = torch.arange(x.shape[1])
        return x[..., None] + self.near(near) + 2 * self.far(near + start)


class _TwiceTheSame(_Twice):
    def forward(self, x, start):
        places = torch.arange(start, start + x.shape[1])
        return x[..., None] + self.near(places) + 2 * self.far(places)


class _Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _Twice()

    def forward(self, x, start):
        return self.inner(x, start)


def test_a_range_that_golden_takes_elsewhere_too_is_not_its_sum():
    runs = []
    for name, model in (("golden", _Inside()), ("mine", _TwiceTheSame())):
        with ld.dump(model, name=name, tokens="all", mode="module+api") as run, torch.no_grad():
            for start, end in ((0, 6), (6, 7), (7, 8)):
                model(torch.arange(8.0)[None, start:end], start)
        runs.append(run)
    found = ld.compare(*runs).findings[0]
    assert (found.path, found.step) == ("inner/Torch.arange", 1)


class _Added(nn.Module):
    """Adds a sine that is one number for all elements. ``moved``: behind the first step."""

    def __init__(self, moved=False):
        super().__init__()
        self.sines, self.more, self.moved = _Sines(), _Sines(), moved

    def forward(self, x, start):
        places = torch.full((1, len(x)), 3.0 + (self.moved and start > 0))
        return x + self.sines(places) * self.more(places)


class _AddedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _Added()

    def forward(self, x, start):
        return self.inner(x, start).clone()


class _AddedElsewhere(_Added):
    pass


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize(("moved", "verdict"), [(False, "match"), (True, "diverged")])
def test_a_wrong_result_that_is_one_number_is_no_match_behind_a_wrapper(mode, moved, verdict):
    x, runs = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), []
    for name, model in (("golden", _AddedInside()), ("mine", _AddedElsewhere(moved))):
        with ld.dump(model, name=name, tokens="all", mode=mode) as run, torch.no_grad():
            for step in range(3):
                model(x if step == 0 else torch.ones(1, 16), step)
        runs.append(run)
    report = ld.compare(*runs)
    assert report.verdict == verdict
    results = [d for d in report.differences if d.site.path == "" and d.site.role == "output"]
    assert all(d.pair.mine is not None for d in results)


class _Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class _Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def _wrapped_layers(model):
    for layer in model.model.layers:
        layer.mlp = _Wrapper(layer.mlp)
    return model


def _adapted(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Adapter(layer.self_attn.q_proj)
    return _Wrapper(_Wrapper(model))


@pytest.mark.parametrize(
    "wrap", [_Wrapper, _wrapped_layers, _adapted, lambda m: _Wrapper(_Wrapper(m))]
)
def test_a_wrapped_model_pairs_completely_and_only_the_wrapping_stays_alone(wrap):
    plain = llama()
    golden = _run("golden", plain, prompt(), weights=True)
    report = ld.compare(golden, _run("mine", wrap(copy.deepcopy(plain)), prompt(), weights=True))
    assert report.verdict == "match"
    assert _alone(report, "golden") == set()
    assert Counter(d.verdict for d in _paired(report)) == {"match": len(golden)}
    assert all(
        d.reason == f"only in mine: {Reason.NO_PATH.text}"
        for d in report.differences
        if d.verdict == "unmatched"
    )


def test_a_bare_model_pairs_with_the_one_that_has_a_head():
    model = llama()
    report = ld.compare(_run("golden", model.model, prompt()), _run("mine", model, prompt()))
    assert _alone(report, "golden") == set()
    assert _alone(report, "mine") == {"", "lm_head"}
    assert all(d.pair.why.startswith("same path below a wrapper 'model'") for d in _paired(report))


# --- operators ---------------------------------------------------------------------------------


class _TwoMatmuls(nn.Module):
    """A linear layer as the product of two matrices, of its singular value decomposition."""

    def __init__(self, linear):
        super().__init__()
        u, s, vh = torch.linalg.svd(linear.weight.double(), full_matrices=False)
        self.a, self.b = (vh.T * s).float().contiguous(), u.T.float().contiguous()

    def forward(self, x):
        return torch.matmul(torch.matmul(x, self.a), self.b)


@pytest.mark.parametrize("mode", ["module+api", "module+aten"])
def test_a_linear_replaced_by_two_matmuls_shifts_nothing_and_is_no_error(mode):
    plain, other = llama(), llama()
    other.model.layers[0].mlp.down_proj = _TwoMatmuls(other.model.layers[0].mlp.down_proj)
    report = ld.compare(
        _run("golden", plain, prompt(), mode=mode), _run("mine", other, prompt(), mode=mode)
    )
    assert report.verdict in AGREED
    place = "model.layers.0.mlp.down_proj"
    assert {
        path.partition("/")[0] for side in ("golden", "mine") for path in _alone(report, side)
    } == {place}
    result = [
        d
        for d in report.differences
        if d.site.path.startswith(place + "/") and d.site.role == "output"
        if d.pair.golden and d.pair.mine
    ]
    (result,) = result
    assert result.verdict in AGREED
    assert result.pair.why.endswith("with the same result")


@pytest.mark.parametrize("names", [("eager", "sdpa"), ("sdpa", "eager")])
def test_between_eager_attention_and_sdpa_only_the_inner_operators_stay_unpaired(names):
    model, runs = llama(), []
    for name in names:
        model.set_attn_implementation(name)
        runs.append(_run(name, model, prompt(), mode="module+api"))
    report = ld.compare(*runs)
    assert report.verdict in AGREED
    for side in ("golden", "mine"):
        assert not any(
            "mlp" in path or "norm" in path or "proj" in path for path in _alone(report, side)
        )
    pairs = _partners(report)
    for i in (0, 1):
        last, fused = (
            f"model.layers.{i}.self_attn/{op}"
            for op in ("Torch.matmul#1", "Functional.scaled_dot_product_attention#0")
        )
        both = (last, fused) if names[0] == "eager" else (fused, last)
        assert tuple((path, "output", "0") for path in both) in pairs


@pytest.mark.parametrize("after_a_bug", [False, True])
def test_one_more_operator_in_front_shifts_no_call_number_even_after_a_bug(after_a_bug):
    class Net(nn.Module):
        def __init__(self, extra):
            super().__init__()
            self.extra, self.w = (
                extra,
                nn.Parameter(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))),
            )

        def forward(self, x):
            if self.extra:
                y = nn.functional.linear(x, self.w[0].t()).sum()
                x = x * (1.3 if after_a_bug else 1.0) + 0 * y
            for w in self.w:
                x = nn.functional.silu(nn.functional.linear(x, w))
            return x

    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    report = ld.compare(
        *(_run(str(extra), Net(extra), x, mode="module+api") for extra in (False, True))
    )
    linear = {(g[0], m[0]) for g, m in _partners(report) if "linear" in g[0]}
    assert linear == {(f"/Functional.linear#{i}", f"/Functional.linear#{i + 1}") for i in range(3)}
    assert "/Functional.linear" in _alone(report, "mine")
    assert report.verdict == ("diverged" if after_a_bug else "match")


def test_operands_in_another_order_pair_with_each_other():
    class Sum(nn.Module):
        def __init__(self, turned):
            super().__init__()
            self.turned, self.scale = turned, nn.Parameter(torch.ones(()))

        def forward(self, x):
            parts = (x * self.scale, x.exp())
            return torch.add(*(parts[::-1] if self.turned else parts))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    report = ld.compare(
        *(_run(str(turned), Sum(turned), x, mode="module+api") for turned in (False, True))
    )
    added = [
        d for d in report.differences if d.site.path == "/Torch.add" and d.site.role == "input"
    ]
    assert [(d.pair.golden.site.slot, d.pair.mine.site.slot, d.verdict) for d in added] == [
        ("0", "1", "match"),
        ("1", "0", "match"),
    ]
    assert all("operands in another order" in d.pair.why for d in added)


def test_runs_of_modules_and_of_operators_say_which_level_the_other_lacks():
    model = llama()
    report = ld.compare(
        _run("golden", model, prompt()), _run("mine", model, prompt(), mode="module+api")
    )
    alone = [d for d in report.differences if d.verdict == "unmatched"]
    assert alone
    assert {d.reason for d in alone} == {f"only in mine: {Reason.NO_LEVEL.text}"}


# --- batches and tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("row", [0, 1])
def test_batch_1_is_compared_with_its_row_of_batch_2(mode, row):
    model, ids = llama(), prompt(batch=2)
    report = ld.compare(
        _run("golden", model, ids[row : row + 1], mode=mode), _run("mine", model, ids, mode=mode)
    )
    assert report.verdict in AGREED
    assert _alone(report, "golden") == _alone(report, "mine") == set()
    says = {d.pair.fit.says for d in report.differences if d.pair.fit}
    assert says == {f"row {row} of 2 of mine's batch"}


def _generated(name, model, ids, **options):
    with ld.dump(model, name=name, tokens="0-2", mode=options.pop("mode", "module")) as run:
        model.generate(ids, max_new_tokens=4, do_sample=False, **options)
    return run


def test_batch_1_is_compared_with_its_row_of_batch_2_in_every_step_of_a_generation():
    model, ids = llama(), prompt(batch=2)
    report = ld.compare(_generated("golden", model, ids[1:]), _generated("mine", model, ids))
    assert report.verdict in AGREED
    assert {d.verdict for d in report.differences} <= AGREED


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_prompt_padded_on_the_left_is_compared_token_by_token_prefill_and_decode(mode):
    model, ids = llama(), prompt()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mine = _generated("mine", model, padded, attention_mask=(padded > 0).long(), mode=mode)
    report = ld.compare(_generated("golden", model, ids, mode=mode), mine)
    assert report.verdict in AGREED
    judged = [
        d for d in report.differences if d.site.path == "model.layers.1" and d.site.role == "output"
    ]
    assert len(judged) == 3
    assert {d.verdict for d in judged} <= AGREED
    assert judged[0].pair.fit.says == "tokens 0-6 of golden against 3-9 of mine"


def test_padding_on_the_left_and_on_the_right_is_compared_row_by_row():
    model, pad = llama(), torch.zeros(1, 2, dtype=torch.long)
    short, long = prompt(5, seed=1), prompt(7, seed=2)
    runs = []
    for name, row in (("left", [pad, short]), ("right", [short, pad])):
        ids = torch.cat([torch.cat(row, 1), long])
        mask = (ids > 0).long()
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        runs.append(_run(name, model, ids, attention_mask=mask, position_ids=places))
    report = ld.compare(*runs)
    assert {d.verdict for d in report.differences} <= AGREED
    assert {d.pair.fit.says for d in report.differences} == {
        "tokens 2-6 of golden against 0-4 of mine, and so on for each row"
    }


def test_a_bug_shows_through_another_batch_and_padding():
    model, ids = llama(), prompt(batch=2)
    broken = copy.deepcopy(model)
    broken.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, out: out * 1.001)
    report = ld.compare(_run("golden", model, ids[1:]), _run("mine", broken, ids))
    assert report.findings[0].path == "model.layers.1.mlp.act_fn"


def test_other_tokens_are_another_input_and_no_other_layout():
    model, ids = llama(), prompt()
    other = ids.clone()
    other[0, -1] += 1
    report = ld.compare(_run("golden", model, ids), _run("mine", model, other))
    assert not any(d.pair.fit for d in report.differences)
    assert report.first_divergence.site.role == "input"
    assert report.first_divergence.site.path == ""


# --- how tensors lie ---------------------------------------------------------------------------


def _pairs(golden, mine, **site):
    """Pair tensors given as {(role, slot, op, rank): tensor} of one module."""
    sides, stores = [], []
    for tensors in (golden, mine):
        records = [
            Record(i, Site("m", role=role, slot=slot, rank=rank, **site), i, op, summarize(tensor),
                payload=i)
            for i, ((role, slot, op, rank), tensor) in enumerate(tensors.items())
        ]  # fmt: skip
        sides.append(records)
        stores.append(list(tensors.values()))
    return pairing.pair(*sides, load=tuple(lambda r, s=store: s[r.id] for store in stores))


def _fitted(golden, mine, role="output", ops=("A", "B")):
    (pair,) = _pairs({(role, "0", ops[0], 0): golden}, {(role, "0", ops[1], 0): mine})
    if pair.fit is None:
        return None, golden, mine
    return pair.fit.says, *pair.fit(golden, mine)


X = torch.randn(
    2, 4, 6, 8, generator=torch.Generator().manual_seed(0)
)  # batch, heads, tokens, width


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        (X.transpose(1, 2), "axes (0, 2, 1, 3) of golden"),
        (X.transpose(1, 2).reshape(2, 6, 32), "axes (0, 2, 1, 3) of golden, then flattened"),
        (X.reshape(8, 6, 8), "reshaped"),
        (X[:1], "0 of 2 along axis -4 of golden"),
        (X[:, :, 1:4], "1-3 of 6 along axis -2 of golden"),
        (X[..., 4:], "4-7 of 8 along axis -1 of golden"),
        (X[:, ::2], "0 of each 2 along axis -3 of golden"),
    ],
)
def test_the_layout_of_an_activation_is_found_and_described_and_undone(mine, says):
    layout, g, m = _fitted(X, mine)
    assert layout == says
    assert torch.equal(g, m)
    layout, m, g = _fitted(mine, X)
    assert torch.equal(g, m)


def test_a_weight_of_another_kind_of_layer_may_lie_transposed_and_one_of_the_same_may_not():
    w = X[0, 0, :, :6].contiguous()
    layout, g, m = _fitted(w, w.t().contiguous(), "weight", ("Conv1D", "Linear"))
    assert layout == "transposed"
    assert torch.equal(g, m)
    assert _fitted(w, w.t().contiguous(), "weight", ("Linear", "Linear"))[0] is None


def test_different_values_have_no_layout():
    other = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(9))
    assert _fitted(X, other)[0] is None
    assert _fitted(X, other[:1, :, :8])[0] is None


@pytest.mark.parametrize("offset", [None, -3])
@pytest.mark.parametrize("group", [None, 4])
def test_a_quantised_weight_is_compared_dequantised(offset, group):
    w = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
    blocks = w.reshape(6, -1, group or 16)
    scale = blocks.abs().amax(-1) / 100
    q = (torch.round(blocks / scale[..., None]) + (offset or 0)).reshape(6, 16).to(torch.int8)
    mine = {("weight", "weight", "QLinear", 0): q, ("weight", "weight_scale", "QLinear", 0): scale}
    if offset is not None:
        mine["weight", "weight_offset", "QLinear", 0] = torch.full_like(scale, offset)
    pairs = _pairs({("weight", "weight", "Linear", 0): w}, mine)
    both = next(p for p in pairs if p.golden and p.mine)
    g, m = both.fit(w, q)
    assert both.fit.says.startswith(
        "dequantised: " + ("w * scale" if offset is None else "(w - offset) * scale")
    )
    expected = (
        (q.double().reshape(blocks.shape) - (offset or 0)) * scale[..., None].double()
    ).reshape(6, 16)
    assert torch.allclose(m, expected, rtol=0, atol=1e-12)
    assert (g - m).abs().max() <= scale.max() / 2 + 1e-6  # half a step of rounding


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_compared_with_their_part_of_the_whole(axis):
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(4))
    shards = w.chunk(2, axis)
    pairs = _pairs({("weight", "weight", "Linear", 0): w},
                   {("weight", "weight", "Linear", rank): shard.contiguous() for rank,
                       shard in enumerate(shards)})  # fmt: skip
    assert [(p.golden.id, p.mine.site.rank) for p in pairs] == [(0, 0), (0, 1)]
    for p, shard in zip(pairs, shards, strict=True):
        g, m = p.fit(w, shard)
        assert torch.equal(g, m)
        size = w.shape[axis] // 2
        start = size * p.mine.site.rank
        assert (
            p.fit.says
            == f"{start}-{start + size - 1} of {2 * size} along axis {axis - 2} of golden"
        )
