"""Pairing, verdict and blame on real models."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align import pairing
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.notebook import display
from models import ARCHITECTURES, generate, gpt2, llama, prompt
from recordings import AGREED, recorded, recorded_both, scaled


def _pair(model, change, tokens="0-2", **options):
    """Record a model and a changed copy of it; ``change(copy)`` plants the difference."""
    broken = copy.deepcopy(model)
    change(broken)
    return recorded_both(model, broken, lambda m: generate(m, new=4), tokens=tokens, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_matches_itself(architecture):
    model = ARCHITECTURES[architecture]()
    report = ld.compare(*_pair(model, lambda m: None))
    assert report.verdict == "match"
    assert report.first_divergence is None
    assert report.findings == []
    assert {d.verdict for d in report.differences} == {"match"}


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.1.mlp.act_fn",
        "model.layers.0.self_attn.q_proj",
        "model.norm",
        "lm_head",
        "model.embed_tokens",
    ],
)
def test_a_wrong_leaf_is_blamed_and_nothing_that_inherits(path):
    report = ld.compare(*_pair(llama(), scaled(path, 1.001)))
    assert report.verdict == "diverged"
    assert report.findings[0].path == path
    assert report.findings[0].cause == "introduced"
    assert report.findings[0].step == 0
    assert [f.path for f in report.findings] == [path]
    assert report.first_divergence.site.path == path


def test_code_between_the_modules_is_blamed_on_the_module_it_belongs_to(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = llama()
    with ld.dump(model, name="golden", tokens="0-2") as golden:
        generate(model, new=4)
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin, **rest: rotate(q, k, cos, -sin, **rest),
    )
    with ld.dump(model, name="mine", tokens="0-2") as mine:
        generate(model, new=4)
    report = ld.compare(golden, mine)
    assert report.findings[0].path == "model.layers.0.self_attn"
    assert report.findings[0].op == "LlamaAttention"
    assert report.first_divergence.site.path == "model.layers.0.self_attn.o_proj"


def test_two_bugs_are_two_findings_in_execution_order():
    def change(model):
        scaled("transformer.h.0.mlp.act", 1.01)(model)
        model.transformer.wpe.weight.data.mul_(1.01)

    report = ld.compare(*_pair(gpt2(), change))
    assert [f.path for f in report.findings][:1] == ["transformer.wpe"]


def test_a_wrong_input_is_reported_before_any_call_is_blamed():
    model = llama()
    runs = (recorded(model, prompt(seed=seed), name=f"r{seed}") for seed in (0, 1))
    finding = ld.compare(*runs).findings[0]
    assert (finding.path, finding.cause) == ("", "wrong input")


def test_the_same_weights_in_bf16_are_within_noise_and_a_bug_in_bf16_is_not():
    golden, mine = _pair(llama(), lambda m: m.to(torch.bfloat16), tokens="0")
    report = ld.compare(golden, mine)
    assert report.verdict == "within_noise"
    broken = _pair(
        llama(),
        lambda m: (scaled("model.layers.0.mlp.act_fn", 1.5)(m), m.to(torch.bfloat16)),
        tokens="0",
    )
    report = ld.compare(*broken)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "model.layers.0.mlp.act_fn"


def test_rows_without_a_partner_stay_visible_on_both_sides_with_a_reason():
    class Short(nn.Module):
        def __init__(self, more):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.more = more

        def forward(self, x):
            x = self.a(x)
            return self.a(self.b(x)) if self.more else x

    runs = []
    torch.manual_seed(0)
    module = Short(True)
    for name, more in (("golden", True), ("mine", False)):
        module.more = more
        with ld.dump(module, name=name, tokens="all") as run:
            module(torch.ones(1, 3))
            if not more:
                module(torch.ones(1, 3))
        runs.append(run)
    report = ld.compare(*runs)
    seen = {
        (d.pair.golden is None, d.site.path): d.reason
        for d in report.differences
        if d.verdict == "unmatched"
    }
    assert seen[False, "b"] == f"only in golden: {Reason.NOT_RECORDED.text}"
    assert seen[False, "a"] == f"only in golden: {Reason.NO_CALL.text}"
    assert seen[True, "a"] == f"only in mine: {Reason.NO_STEP.text}"
    order = [d.pair.either.seq for d in report.differences if d.pair.golden]
    assert order == sorted(order)


def test_differing_shapes_are_diverged_and_say_so():
    model, ids = llama(), (prompt(7), prompt(5, seed=1))  # no part of one is the other
    report = ld.compare(*(recorded(model, each, layers="lm_head") for each in ids))
    assert report.first_divergence.reason.startswith("shape [1, 7, 32] against [1, 5, 32]")
    assert report.verdict == "diverged"


def test_runs_without_a_common_site_are_incomparable():
    for name, model in (("a", llama()), ("b", gpt2())):
        with ld.dump(model, name=name, layers="*.mlp.*"):
            model(prompt())
    report = ld.compare("a", "b")
    assert (report.verdict, report.findings) == ("incomparable", [])
    assert "no site in common" in report.incomparable
    assert "golden has e.g. model.layers.0.mlp" in report.incomparable
    assert "mine transformer.h.0.mlp" in report.incomparable


def test_models_that_share_nothing_but_being_models_are_incomparable():
    linear, convolution = nn.Sequential(nn.Linear(4, 4)), nn.Sequential()
    convolution.add_module("convolution", nn.Conv1d(1, 2, 2))
    for name, model, shape in (("a", linear, (2, 4)), ("b", convolution, (1, 3))):
        with ld.dump(model, name=name):
            model(torch.zeros(shape))
    report = ld.compare("a", "b")
    assert report.verdict == "incomparable"
    assert report.incomparable in report.summary()
    assert report.incomparable in str(report)


def test_statistics_alone_still_find_the_bug():
    golden, mine = _pair(llama(), scaled("model.layers.1.mlp.act_fn", 1.01), stats_only=True)
    report = ld.compare(golden, mine)
    assert report.findings[0].path == "model.layers.1.mlp.act_fn"
    assert "judged by statistics" in report.first_divergence.reason
    same = ld.compare(golden, golden)
    assert same.verdict == "match"


def test_statistics_against_tensors_compares_the_statistics():
    model = llama()
    with ld.dump(model, name="whole") as whole:
        model(prompt())
    with ld.dump(model, name="stats", stats_only=True) as stats:
        model(prompt())
    assert ld.compare(whole, stats).verdict == "match"


def test_nan_on_one_side_is_diverged_and_on_both_is_not():
    class Bad(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = nn.Parameter(torch.tensor(value))

        def forward(self, x):
            return x / self.value

    runs = []
    for name, value in (("nan", 0.0), ("fine", 1.0)):
        module = nn.Sequential(Bad(value))
        with ld.dump(module, name=name) as run:
            module(torch.tensor([0.0, 1.0]))
        runs.append(run)
    assert ld.compare(*runs).verdict == "diverged"
    assert ld.compare(runs[0], runs[0]).verdict == "match"


def test_a_payload_that_is_damaged_is_one_unmatched_row():
    golden, mine = _pair(llama(), scaled("lm_head", 1.01), tokens="0")
    payload = next(mine.path.glob("rank*/tensors.bin"))
    with open(payload, "r+b") as file:
        file.truncate(payload.stat().st_size // 2)
    report = ld.compare(golden, ld.open_run(mine.path))
    assert any("cut short" in (d.reason or "") for d in report.differences)
    assert len(report.differences) == len(golden)
    # the fingerprints still tell what differs, so the verdict does not depend on the damage
    assert report.verdict == "diverged"
    assert report.first_divergence.site.path == "lm_head"
    assert any("cut short" in note for note in report.view().overview()["notes"])
    assert not ld.open_run(mine.path).info()["complete"]


def test_the_table_and_the_files_say_the_same(tmp_path):
    report = ld.compare(*_pair(llama(), scaled("lm_head", 1.01), tokens="0"))
    frame = report.differences.to_pandas()
    assert len(frame) == len(report.differences)
    worst = frame[frame.verdict == "diverged"].iloc[0]
    assert (worst.path, worst.role) == ("lm_head", "output")
    assert worst.relative_euclidean_distance == pytest.approx(0.01, rel=1e-3)
    import pandas

    back = pandas.read_csv(report.differences.to_csv(tmp_path / "d.csv"))
    assert list(back.verdict) == list(frame.verdict)
    page = report.differences.to_html(tmp_path / "d.html").read_text(encoding="utf-8")
    assert "lm_head" in page
    assert "http://" not in page
    assert "https://" not in page
    with pytest.raises(ld.errors.StoreError, match="can't write"):
        report.to_csv(tmp_path / "no" / "such" / "folder.csv")


def test_runs_and_reports_are_tables_for_readers_of_arrow():
    golden, mine = _pair(llama(), scaled("lm_head", 1.01), tokens="0")
    report = ld.compare(golden, mine)
    assert report.to_pandas().equals(report.differences.to_pandas())
    try:
        import pyarrow
    except ImportError:
        for table in (golden, report, report.differences):
            with pytest.raises(
                ld.errors.MissingPackageError,
                match=r"needs pyarrow, which is not installed: pip install pyarrow",
            ):
                table.__arrow_c_stream__()
        return
    for table in (golden, report, report.differences):
        read = pyarrow.table(table).to_pandas()
        assert list(read.path) == list(table.to_pandas().path)
        assert [tuple(shape) for shape in read.filter(regex="shape").iloc[0]] == [
            tuple(shape) for shape in table.to_pandas().filter(regex="shape").iloc[0]
        ]


def test_names_are_escaped_in_html(tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    module = nn.Sequential()
    module.add_module(hostile, nn.Linear(2, 2))
    for name, factor in (("a", 1.0), ("b", 2.0)):
        with ld.dump(module, name=name):
            module(torch.full((1, 2), factor))
    report = ld.compare("a", "b")
    page = report.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    for each in (report, *report.findings, report.differences[-1], report.golden):
        data, _ = display.bundle(each)
        assert "<img src=x" not in data["text/html"]
    assert hostile in data["text/plain"]


def test_explain_can_be_left_out():
    golden, mine = _pair(llama(), scaled("lm_head", 1.01), tokens="0")
    assert ld.compare(golden, mine, explain=False).findings == []


def test_findings_and_differences_are_plain_data():
    report = ld.compare(*_pair(llama(), scaled("lm_head", 1.01), tokens="0"))
    f = report.findings[0]
    json.dumps([f.path, f.op, f.step, f.cause, f.evidence])
    assert "1 differs" in str(report) or "diverged" in str(report)
    assert "diverged" in repr(report.differences)


def _record(i, path, **site):
    return Record(i, Site(path, **site), i, "Op", Summary("float32", (1,)))


def test_a_row_of_mine_alone_stands_after_the_pair_that_ran_before_it():
    golden = [_record(0, "a"), _record(1, "c")]
    mine = [_record(0, "a"), _record(1, "b"), _record(2, "c"), _record(3, "d")]
    assert [p.either.site.path for p in pairing.pair(golden, mine)] == ["a", "b", "c", "d"]
    assert [p.either.site.path for p in pairing.pair([], mine)] == ["a", "b", "c", "d"]


def test_one_extra_call_shifts_no_other_pair():
    golden = [_record(i, f"m{i}") for i in range(5)]
    mine = [_record(0, "extra"), *[_record(i + 1, f"m{i}") for i in range(5)]]
    pairs = pairing.pair(golden, mine)
    assert all(p.golden.site.path == p.mine.site.path for p in pairs if p.golden and p.mine)
    assert sum(p.golden is None for p in pairs) == 1


def test_statistics_that_agree_over_other_bytes_are_no_match():
    def flip(model):
        model.lm_head.register_forward_hook(lambda module, args, out: out.flip(-1))

    report = ld.compare(*_pair(llama(), flip, stats_only=True, layers="lm_head", tokens="0"))
    (row,) = [d for d in report.differences if d.site.role == "output"]
    assert row.verdict == "within_noise"
    assert "the bytes do not" in row.reason


def test_a_partial_recording_is_noted_with_the_verdict():
    model = llama()
    with ld.dump(model, name="whole") as whole:
        model(prompt())
    with ld.dump(model, name="part", layers="lm_head") as part:
        model(prompt())
    report = ld.compare(whole, part)
    assert "73 rows without a partner" in str(report)  # three hold what lm_head takes
    assert "73 of 78 rows could not be compared" in report.view().overview()["notes"][0]


def test_another_token_is_a_cause_of_its_own():
    model, runs = llama(), []
    for name, seed in (("golden", 0), ("mine", 1)):
        with ld.dump(model, name=name, tokens="0-3", seed=seed) as run:
            generate(model, do_sample=True, new=4)
        runs.append(run)
    finding = ld.compare(*runs).findings[0]
    assert finding.cause == "other token"
    assert "another token was chosen" in finding.evidence
    assert finding.step > 0


def test_two_roots_in_one_block_do_not_explain_each_other():
    a, b = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    runs = []
    for name in ("golden", "mine"):
        with ld.dump(name=name) as run, torch.no_grad():
            a(torch.ones(1, 3))
            b(torch.ones(1, 3))
        runs.append(run)
        a.register_forward_hook(lambda module, args, out: out * 2)
        b[0].weight.data.mul_(2)
    assert [f.path for f in ld.compare(*runs).findings] == ["", "Sequential~1.0"]


@pytest.mark.parametrize(
    ("part", "planted", "blamed", "cause"),
    [
        ("out", "lm_head", "lm_head", "introduced or inherited"),
        ("in", "model.norm", "", "introduced before"),
    ],
)
def test_with_half_of_the_tensors_the_cause_names_the_missing_evidence(
    part, planted, blamed, cause
):
    finding, *more = ld.compare(
        *_pair(llama(), scaled(planted, 1.01), part=part, tokens="0")
    ).findings
    assert not more
    assert (finding.path, finding.cause) == (blamed, cause)


def test_a_call_with_missing_inputs_is_not_blamed_for_it():
    class Leaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, mask=None):
            return x * self.weight if mask is None else x * self.weight + mask

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf, self.mask = Leaf(), torch.ones(1, 3)

        def forward(self, x):
            return self.leaf(x, mask=self.mask)

    caller, runs = Caller(), []
    for name in ("golden", "mine"):
        with ld.dump(caller, name=name) as run:
            caller(torch.ones(1, 3))
        runs.append(run)
        caller.mask = None
    finding = ld.compare(*runs).findings[0]
    assert (finding.path, finding.op) == ("", "Caller")


def test_the_same_model_called_with_other_arguments_is_reported():
    model = llama()
    with ld.dump(model, name="generated", tokens="0") as generated:
        generate(model, new=1)
    with ld.dump(model, name="called") as called:
        model(prompt())
    report = ld.compare(generated, called)
    ids, logits = (
        next(d for d in report.differences if d.site.path == "" and d.site.role == role)
        for role in ("input", "output")
    )
    assert ids.pair.why == "same site; input[kwargs.input_ids] is input[0] there"
    assert logits.pair.fit.says == "6 of 7 along axis -2 of mine"
    assert report.verdict in AGREED


def _training(model, ids, **options):
    with ld.dump(model, **{"name": "r", "tokens": "all", **options}) as run:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
    return run


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s)) * 1.01


class _Silu(torch.nn.Module):
    def forward(self, x):
        return _WrongGradient.apply(x)


def test_an_error_that_only_the_backward_pass_makes_is_blamed_on_the_module_that_makes_it():
    golden, broken, ids = llama(), llama(), prompt(batch=2)
    broken.model.layers[0].mlp.act_fn = _Silu()
    report = ld.compare(_training(golden, ids), _training(broken, ids))
    assert report.verdict == "diverged"
    assert report.first_divergence.site.phase == "backward"
    (finding,) = report.findings
    assert finding.path == "model.layers.0.mlp.act_fn"
    assert "the gradient of input 0 differs" in finding.evidence


def test_an_error_of_the_forward_pass_is_not_blamed_on_the_gradients_that_it_spoils():
    golden, broken, ids = llama(), llama(), prompt(batch=2)
    broken.model.layers[0].mlp.act_fn = torch.nn.GELU()
    report = ld.compare(_training(golden, ids), _training(broken, ids))
    assert [finding.path for finding in report.findings] == ["model.layers.0.mlp.act_fn"]


def test_another_weight_is_named():
    golden, broken, ids = llama(), llama(), prompt()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0] *= 1.5
    options = {"weights": True, "phase": "forward"}
    report = ld.compare(_training(golden, ids, **options), _training(broken, ids, **options))
    (finding,) = report.findings
    assert finding.path == "model.layers.1.mlp.up_proj"
    assert "its parameter weight differs" in finding.evidence


def test_gradients_of_only_one_run_are_unmatched_with_that_reason():
    model, ids = llama(), prompt()
    report = ld.compare(_training(model, ids), _training(model, ids, phase="forward"))
    alone = {d.reason for d in report.differences if d.verdict == "unmatched"}
    assert alone == {"only in golden: the other run did not record this phase"}
