"""The verdict: rounding is noise and bugs are not; calibration, fixed limits, user metrics."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import judging, metrics
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, error_of
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.narrow import rounding
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.store.expectation import Expectation
from models import generate, gpt2, llama, mixtral, prompt, qwen2
from recordings import AGREED, compared, scaled

SEEDS = (0, 1, 2)
MODELS = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}
every_model = pytest.mark.parametrize("architecture", MODELS)
every_seed = pytest.mark.parametrize("seed", SEEDS)


def _record(model, name, tokens="0-2", **options):
    with ld.dump(model, name=name, tokens=tokens, **options) as run:
        generate(model, new=3)
    return run


def _compare(golden, mine, **options):
    return ld.compare(golden, mine, progress=False, **options)


def _changed(model, change, **options):
    """Record a model and a changed copy of it, and compare."""
    mine = copy.deepcopy(model)
    change(mine)
    return _compare(_record(model, "golden", **options), _record(mine, "mine", **options))


def _down(model):
    """Return a linear layer of the second layer's MLP."""
    return (
        model.transformer.h[1].mlp.c_proj
        if hasattr(model, "transformer")
        else model.model.layers[1].mlp.down_proj
    )


def _in_two_matmuls(model):
    """Compute one linear layer as the sum of two products: the same, but for rounding."""
    linear = _down(model)
    weight = linear.weight if hasattr(model, "transformer") else linear.weight.T
    half = weight.shape[0] // 2
    bias = 0 if linear.bias is None else linear.bias
    linear.forward = lambda x: x[..., :half] @ weight[:half] + x[..., half:] @ weight[half:] + bias


# -- what is noise ---------------------------------------------------------------------------------


@every_seed
@every_model
@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_the_same_weights_in_bfloat16_are_noise(architecture, seed, mode):
    report = _changed(
        MODELS[architecture](seed), lambda m: m.to(torch.bfloat16), mode=mode, weights=True
    )
    assert report.verdict == "within_noise", report.first_divergence
    assert report.findings == []


@every_seed
@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_attention_kernel_is_noise(architecture, seed, dtype):
    model = MODELS[architecture](seed).to(dtype)
    model.set_attn_implementation("eager")
    report = _changed(model, lambda m: m.set_attn_implementation("sdpa"))
    assert report.verdict in AGREED, report.first_divergence
    assert report.findings == []


@every_seed
@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equivalent_pair_of_matmuls_is_noise(architecture, seed, dtype):
    report = _changed(MODELS[architecture](seed).to(dtype), _in_two_matmuls)
    assert report.verdict in AGREED, report.first_divergence


@every_seed
def test_another_choice_of_experts_at_a_near_tie_is_reported_and_is_not_a_bug(seed):
    model = mixtral(seed)
    with torch.no_grad():
        for layer in model.model.layers:  # three of four experts get all but the same logit
            gate = layer.mlp.gate.weight
            gate[2:] = gate[1] * (1 + 1e-3 * torch.rand(2, gate.shape[1]))
    report = _changed(model, lambda m: m.to(torch.bfloat16))
    assert report.verdict == "within_noise", report.first_divergence
    ties = [d for d in report.differences if d.rule is Rule.NEAR_TIE]
    after = [d for d in report.differences if d.rule is Rule.AFTER_TIE]
    assert ties
    assert after
    assert {d.verdict for d in ties + after} == {"unmatched"}
    assert f"{len(after):,} tensors were not compared" in report.summary()
    assert "no error to explain" not in report.summary()


def test_a_token_chosen_otherwise_at_a_near_tie_is_no_bug():
    class Head(nn.Module):
        def __init__(self, nudge):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(8, 16)
            self.nudge = [nudge]  # no plain attribute: that would be blamed

        def forward(self, ids):
            x = self.embed(ids)[:, -1:]
            logits = x @ self.embed.weight.T
            logits[..., 3] = 99.0
            logits[..., 4] = 99.0 + self.nudge[0]
            return logits

    runs = []
    for name, nudge in (("golden", -1e-5), ("mine", 1e-5)):
        model, ids = Head(nudge), torch.tensor([[1]])
        with ld.dump(model, name=name, tokens="all") as run:
            for _ in range(2):
                ids = model(ids).argmax(-1)
        runs.append(run)
    report = _compare(*runs)
    assert report.verdict == "within_noise"
    (token,) = [
        d
        for d in report.differences
        if d.site.role == "input" and d.site.step == 1 and d.site.path == ""
    ]
    assert (token.verdict, token.rule) == ("unmatched", Rule.NEAR_TIE)


# -- what is not ----------------------------------------------------------------------------------


def _blamed(report):
    assert report.verdict == "diverged"
    return report.first_divergence.site.path


def _act(model):
    return (
        "transformer.h.1.mlp.act" if hasattr(model, "transformer") else "model.layers.1.mlp.act_fn"
    )


def _norm(model):
    return (
        "transformer.h.1.ln_2"
        if hasattr(model, "transformer")
        else "model.layers.1.post_attention_layernorm"
    )


def _other_eps(model):
    norm = model.get_submodule(_norm(model))
    name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, name, 1e-5 if getattr(norm, name) < 5e-6 else 1e-6)


@every_seed
@every_model
def test_a_thousandth_in_one_activation_is_diverged(architecture, seed):
    model = MODELS[architecture](seed)
    assert _blamed(_changed(model, scaled(_act(model), 1.001))) == _act(model)


@every_seed
@every_model
def test_a_wrong_eps_diverges_even_if_its_effect_is_a_few_roundings(architecture, seed):
    model = MODELS[architecture](seed)
    for parameter in model.parameters():
        parameter.data.mul_(
            4 if parameter.dim() > 1 else 1
        )  # the norm's input is of order one, and eps nearly nothing in it
    report = _changed(model, _other_eps)
    assert _blamed(report) == _norm(model)
    assert report.first_divergence.metrics["relative_euclidean_distance"] < 3e-4


@every_seed
@every_model
def test_a_wrong_eps_is_found_behind_another_attention_kernel(architecture, seed):
    model = MODELS[architecture](seed)
    model.set_attn_implementation("eager")
    report = _changed(model, lambda m: (m.set_attn_implementation("sdpa"), _other_eps(m)))
    assert _blamed(report) == _norm(model)


@every_seed
@every_model
def test_four_percent_in_bfloat16_against_float32_are_diverged(architecture, seed):
    model = MODELS[architecture](seed)
    path = _act(model)
    report = _changed(model, lambda m: (scaled(path, 1.04)(m), m.to(torch.bfloat16)), tokens="0")
    assert _blamed(report) == path


def test_an_embedding_scale_rounded_to_bfloat16_is_diverged_though_below_one_eps():
    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.factor = nn.Embedding(50, 64, dtype=torch.bfloat16), factor

        def forward(self, ids):
            return self.embed(ids) * self.factor

    report = compared(Scaled(55.4256), Scaled(55.5), prompt(20, vocabulary=50))
    (row,) = [d for d in report.differences if d.verdict == "diverged"]
    assert row.rule is Rule.TOO_EVEN
    assert row.metrics["relative_euclidean_distance"] < 2.0**-7


# -- the rules by themselves ----------------------------------------------------------------------


def _row(
    i,
    path,
    role="output",
    error=0.0,
    dtype="float32",
    shape=(8, 64),
    step=0,
    slot="0",
    op="Op",
    **values,
):
    record = Record(i, Site(path, step=step, role=role, slot=slot), i, op, Summary(dtype, shape))
    values = {"row_error": error, **values}
    return Measured(i, Pair(record, record, "same site"), values)


def _judging(*rows, **options):
    return judging.Judging([_row(i, *row[0], **row[1]) for i, row in enumerate(rows)], **options)


def _judged(*rows, **options):
    return _judging(*rows, **options).plain


def _at(path, role="output", **values):
    return (path, role), values


EPS = 2.0**-23


@given(st.floats(0, 1), st.sampled_from(["float64", "float32", "float16", "bfloat16"]))
def test_without_noise_in_its_inputs_a_call_may_only_round(error, dtype):
    (_, row) = _judged(_at("a", "input", dtype=dtype), _at("a", error=error, dtype=dtype))
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert row.limit == pytest.approx(
        eps + 1 * min(eps, EPS)
    )  # a longest axis of 64: sqrt(64) / 8 = 1
    assert row.verdict == (
        "match" if error == 0 else "within_noise" if error <= row.limit else "diverged"
    )


@given(st.floats(0, EPS), st.floats(0, EPS))
def test_more_noise_in_never_means_less_allowed_out(first, second):
    low, high = sorted((first, second))
    limits = [
        _judged(_at("", "input"), _at("a", "input", error=e), _at("a", error=0.0))[-1].limit
        for e in (low, high)
    ]
    assert limits[0] <= limits[1]


def test_noise_excuses_its_consequences_and_a_diverged_tensor_does_not():
    quiet = _judged(_at("a"), _at("b", "input"), _at("b", error=5 * EPS))[-1]
    noisy = _judged(
        _at("a", error=1.5 * EPS), _at("b", "input", error=1.5 * EPS), _at("b", error=5 * EPS)
    )[-1]
    broken = _judged(_at("a", error=0.1), _at("b", "input", error=0.1), _at("b", error=0.1))
    assert (quiet.verdict, noisy.verdict) == ("diverged", "within_noise")
    assert [d.verdict for d in broken] == ["diverged"] * 3
    assert broken[-1].limit < 20 * EPS


def test_what_only_the_limit_of_an_earlier_divergence_explains_differs_and_is_no_divergence():
    broken = _at("a", error=0.1), _at("b", "input", error=0.1)
    by_noise, by_limit = (_judged(*broken, _at("b", error=e * EPS))[-1] for e in (0.5, 2.5))
    assert by_noise.verdict == by_limit.verdict == "within_noise"
    assert not by_noise.differs
    assert by_limit.differs
    assert by_limit.rule is Rule.PASSED_ON


FOLLOWING = _at("a", error=0.1), _at("b", "input", error=0.1), _at("b", error=2.5 * EPS)


def test_what_follows_an_expected_divergence_no_longer_differs():
    judging = _judging(*FOLLOWING)
    assert judging.plain[-1].follows
    *_, last = judging.differences([Expectation("a")])
    assert (last.verdict, last.differs, last.reason) == ("within_noise", False, None)
    *_, last = judging.differences([Expectation("elsewhere")])
    assert last.differs


def test_a_row_that_follows_can_be_expected_itself():
    *_, last = _judging(*FOLLOWING).differences([Expectation("b", role="output")])
    assert (last.verdict, last.differs) == ("expected", False)


def _seen_again(error):
    """Judge a tensor behind one that diverged, and again as an input, where the limit is larger."""
    rows = [_row(0, "a", error=0.1), _row(1, "b", "input", error=0.1)]
    for i, (path, role) in enumerate((("b", "output"), ("c", "input")), 2):
        row = _row(i, path, role, error)
        own = {"fingerprint": "xxh3:1", "min": -1.0, "max": 1.0}  # values that identify it
        summary = dataclasses.replace(row.pair.golden.summary, **own)
        record = dataclasses.replace(row.pair.golden, summary=summary)
        row.pair = dataclasses.replace(row.pair, golden=record, mine=record)
        rows.append(row)
    return judging.Judging(rows, calibration=_noisy(rows[-1], error)).plain[2:]


def _noisy(row, error):
    """Tell of one place that noise alone explains an error there."""
    calibration = judging.Calibration()
    calibration.add("again", [row])
    assert calibration.limits(row.pair.golden)[0] > error
    return calibration


@pytest.mark.parametrize(("error", "follows"), [(2.5 * EPS, True), (0.5 * EPS, False)])
def test_two_tensors_that_only_a_passed_on_limit_explains_differ_where_they_are_seen_again(
    error, follows
):
    first, again = _seen_again(error)
    assert (first.verdict, again.verdict) == ("within_noise", "within_noise")
    assert (first.follows, again.follows) == (follows, follows)


def _matched_elsewhere(elsewhere, error):
    """Judge a call whose input was matched by value, with this error, and whose output is off."""
    taken = _row(0, "f", "input", error=error)
    taken.pair = dataclasses.replace(taken.pair, elsewhere=elsewhere)
    weight = _row(1, "f", "input", slot="1")
    return judging.Judging([taken, weight, _row(2, "f", error=2.5 * EPS)]).plain


def test_the_noise_of_an_input_counts_though_its_partner_is_at_another_place():
    assert _matched_elsewhere("golden", 1.5 * EPS)[-1].verdict == "within_noise"
    assert _matched_elsewhere("golden", 0.0)[-1].verdict == "diverged"
    assert _matched_elsewhere("mine", 1.5 * EPS)[-1].verdict == "diverged"  # one partner too many


def test_a_partner_at_another_place_that_is_beyond_noise_is_none():
    taken, _, made = _matched_elsewhere("golden", 0.1)
    assert (taken.verdict, taken.rule) == ("unmatched", Rule.CLOSE)
    assert made.limit < 10 * EPS


def test_integers_have_no_noise_of_their_own():
    rows = _judged(
        _at("a", "input", error=EPS), _at("a.b", "input", error=0.1, dtype="int64", mismatched=3)
    )
    assert rows[-1].verdict == "diverged"


def test_siblings_tell_how_much_a_kind_of_call_amplifies_but_a_path_never_excuses_itself():
    def layers(ratios):
        for i, ratio in enumerate(ratios):
            yield _at(f"l.{i}.f", "input", error=EPS)
            yield _at(f"l.{i}.f", error=ratio * EPS)

    steep = _judged(*layers([9, 9, 9, 9]))
    odd = _judged(*layers([1, 1, 9, 1]))
    assert {d.verdict for d in steep if d.site.role == "output"} == {"within_noise"}
    assert [d.site.path for d in odd if d.verdict == "diverged"] == ["l.2.f"]


def _norms_of_one_token(seed):
    """Measure norms of bfloat16, with noise in their inputs and three channels that are large."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.ones(256)
    scale[:3] = 60.0  # as trained language models have them
    for layer in range(24):
        golden = torch.randn(1, 256, generator=generator)
        mine = golden + 0.005 * torch.randn(1, 256, generator=generator)
        for i, (role, factor) in enumerate((("input", 1.0), ("output", scale))):
            summary = summarize((golden * factor).bfloat16())
            site = Site(f"l.{layer}.n", role=role)
            record = Record(2 * layer + i, site, 2 * layer + i, "Norm", summary)
            figures = metrics.compare(golden * factor, mine * factor)
            yield Measured(record.id, Pair(record, record, "same site"), figures)


def test_noise_is_noise_where_few_channels_carry_the_norm_and_happen_to_be_small():
    outputs = [
        d
        for seed in range(10)
        for d in judging.Judging([*_norms_of_one_token(seed)]).plain
        if d.site.role == "output"
    ]
    assert {d.verdict for d in outputs} == {"within_noise"}
    errors = sorted(d.error for d in outputs)
    assert errors[-1] > 4 * errors[len(errors) // 2]  # the siblings alone would not explain it


def test_an_even_factor_is_diverged_below_the_limit_of_the_error():
    even = {"scale_error": 1e-3, "scale_t": 50.0}
    chance = {"scale_error": 1e-3, "scale_t": 3.0}
    rows = [
        _judged(_at("a", "input", dtype="bfloat16"), _at("a", error=1.2e-3, dtype="bfloat16", **e))
        for e in (even, chance)
    ]
    assert [r[-1].verdict for r in rows] == ["diverged", "within_noise"]
    assert rows[0][-1].rule is Rule.TOO_EVEN


def test_a_module_of_which_nothing_inside_was_recorded_may_round_more_often():
    few = _judged(_at("a", "input"), _at("a", error=0.0))[-1].limit
    many = _judged(_at("a", "input"), _at("a", error=0.0), golden=judging.Golden(lambda path: 24))[
        -1
    ].limit
    assert many == pytest.approx(constants.GLUE_FLOORS * math.sqrt(25) * few)


def test_nan_on_one_side_diverges_whatever_the_noise():
    assert _judged(_at("a", error=0.0, nan_mismatch=1))[-1].verdict == "diverged"
    assert _judged(_at("a", error=0.0, inf_mismatch=2))[-1].error == math.inf


# -- calibration ----------------------------------------------------------------------------------


class _Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drop, self.b = nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)

    def forward(self, x):
        return self.b(self.drop(self.a(x)))


def _dropped(name, change=lambda model: None, seed=None):
    model = _Dropping().train()
    change(model)
    with ld.dump(model, name=name, seed=seed, phase="forward") as run:
        model(torch.ones(8, 64))
    return run


def test_a_program_that_varies_from_run_to_run_is_noise_once_a_second_golden_says_so():
    golden, again, mine = (
        _dropped(name, seed=seed) for seed, name in enumerate(("golden", "again", "mine"))
    )
    assert _compare(golden, mine, explain=False).verdict == "diverged"
    report = _compare(golden, mine, calibrate=again)
    assert report.verdict == "within_noise"
    assert "calibrated with again" in report.limits
    assert any("calibrated with again" in note for note in report.view().overview()["notes"])


def test_calibration_excuses_no_bug_in_tensors_that_do_not_vary():
    golden, again = _dropped("golden", seed=0), _dropped("again", seed=1)
    mine = _dropped(
        "mine", lambda model: model.a.register_forward_hook(lambda m, a, out: out * 1.001), seed=2
    )
    report = _compare(golden, mine, calibrate=[again.name, _dropped("third", seed=3)])
    assert report.first_divergence.site.path == "a"


def test_a_coarser_golden_run_calibrates_a_finer_comparison():
    model = llama()
    golden, coarse = (
        _record(model, "golden"),
        _record(copy.deepcopy(model).to(torch.bfloat16), "coarse"),
    )
    run = _record(copy.deepcopy(model).to(torch.bfloat16).float(), "mine")
    assert _compare(golden, run).verdict == "diverged"
    assert _compare(golden, run, calibrate=coarse).verdict == "within_noise"


# -- fixed limits ---------------------------------------------------------------------------------


def _lm_head_off_by(factor, dtype=torch.float32):
    model = llama().to(dtype)
    return [
        _record(model, "golden", tokens="0"),
        _record((scaled("lm_head", factor)(model), model)[1], "mine", tokens="0"),
    ]


def test_fixed_limits_apply_to_matching_paths_and_the_report_says_so():
    golden, mine = _lm_head_off_by(1.01)
    assert _compare(golden, mine).verdict == "diverged"
    limits = {"lm_head": {"cosine": 0.999}, "": {"relative_l2": 0.02}}
    assert _compare(golden, mine, limits=limits).verdict == "within_noise"
    report = _compare(
        golden, mine, limits={"*": {"relative_l2": 0.02}, "lm_head": {"relative_l2": 0.005}}
    )
    bad = [d for d in report.differences if d.verdict == "diverged"]
    assert [d.site.path for d in bad] == ["lm_head"]
    assert (bad[0].error, bad[0].limit) == (pytest.approx(0.01, rel=1e-3), 0.005)
    assert "relative_euclidean_distance 0.01, at most 0.005 (limits: lm_head)" in bad[0].reason
    assert "fixed by limits for" in report.limits


def test_limits_may_differ_by_dtype():
    rules = {"*": {"bfloat16": {"relative_l2": 0.02}, "float32": {"relative_l2": 0.005}}}
    assert _compare(*_lm_head_off_by(1.01), limits=rules).verdict == "diverged"
    assert _compare(*_lm_head_off_by(1.01, torch.bfloat16), limits=rules).verdict == "within_noise"


def test_upstreams_rules_are_there_by_name():
    golden, mine = _lm_head_off_by(1.005)
    report = _compare(golden, mine, limits={"*": "msprobe", "lm_head": "msit_logits"})
    assert report.verdict == "within_noise"
    assert _compare(*_lm_head_off_by(1.5), limits={"*": "msit_logits"}).verdict == "diverged"


def test_the_same_limits_from_yaml_and_from_json(tmp_path):
    rules = {
        "*": {"relative_l2": 0.02},
        "lm_head": [{"cosine": 0.9, "max_abs": 1e-3}, {"kl": 1e-9}],
    }
    (tmp_path / "l.json").write_text(json.dumps(rules), encoding="utf-8")
    (tmp_path / "l.yaml").write_text(
        "'*': {relative_l2: 0.02}\nlm_head:\n- cosine: 0.9\n  max_abs: 1e-3\n- kl: 1e-9\n",
        encoding="utf-8",
    )
    golden, mine = _lm_head_off_by(1.01)
    reports = [
        _compare(golden, mine, limits=x)
        for x in (rules, tmp_path / "l.json", str(tmp_path / "l.yaml"))
    ]
    assert len({tuple((d.verdict, d.error, d.limit) for d in r.differences) for r in reports}) == 1
    assert "fixed by l.yaml for" in reports[2].limits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "a: {relative_l2: 0.1}\nb:\n  cosin: 0.9\n",
            r"l.yaml, line 3: b > cosin: .*is not a metric; nearest: cosine",
        ),
        ("a: {max_abs: often}\n", r"l.yaml, line 1: a > max_abs: 'often' is not a limit"),
        ("\na: msprob\n", r"l.yaml, line 2: a: 'msprob' is not a rule; nearest: msprobe"),
        ("a: {max_abs: 1}\na: {max_abs: 2}\n", r"l.yaml, line 2: a stands on line 1 already"),
        ("a: {max_abs: 1\nb: [", r"l.yaml, line 2: "),
        ("- a\n", r"l.yaml: .*is not a mapping"),
        ("", r"l.yaml: .*is not a mapping"),
        (
            "a: {float32: {max_abs: -1}}",
            r"l.yaml, line 1: a > float32 > max_abs: -1 is not a limit",
        ),
        ("a: 3", r"l.yaml, line 1: a: expected metric: number"),
    ],
)
def test_an_error_in_a_limits_file_names_key_and_line(tmp_path, text, says):
    (tmp_path / "l.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ld.errors.OptionError, match=says):
        Limits.read(tmp_path / "l.yaml")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "limits 3: expected a mapping"),
        ("gone.yaml", "can't be read"),
        ({"a": {"x": 1}}, "limits: a > x: .*is not a metric"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given, says):
    with pytest.raises(ld.errors.OptionError, match=says):
        Limits.read(given)


@settings(max_examples=30)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_all_of_a_set_and_any_of_a_list_must_hold(cosine, distance, least, most):
    record = _row(0, "a").pair
    both = Limits.read({"a": {"cosine": least, "max_abs": most}})
    either = Limits.read({"a": [{"cosine": least}, {"max_abs": most}]})
    metrics = {"cosine_similarity": cosine, "max_absolute_error": distance}
    good, fine = 1 - cosine <= 1 - least, distance <= most

    def holds(limits):
        judged = limits.of(record, metrics)
        return judged.error <= judged.limit

    assert (holds(both), holds(either)) == (good and fine, good or fine)


# -- user metrics ---------------------------------------------------------------------------------


def test_a_users_metric_is_measured_beside_ours_and_may_be_limited():
    def worst(golden, mine):
        return (golden - mine).abs().max()

    golden, mine = _lm_head_off_by(1.01)
    report = _compare(golden, mine, metrics=worst, limits={"lm_head": {"worst": 1e-9}})
    row = next(
        d for d in report.differences if d.site.path == "lm_head" and d.site.role == "output"
    )
    assert row.metrics["worst"] == pytest.approx(row.metrics["max_absolute_error"])
    assert "worst" in report.differences.to_pandas()
    assert row.reason.startswith("worst ")


def test_an_error_in_a_users_metric_is_one_line_and_ends_nothing():
    def breaks(golden, mine):
        raise ZeroDivisionError("no\nway")

    def writes(golden, mine):
        golden.zero_()
        return float(mine.abs().sum())

    golden, mine = _lm_head_off_by(1.01)
    report = _compare(golden, mine, metrics={"breaks": breaks, "writes": writes})
    assert report.findings[0].path == "lm_head"
    (note,) = [note for note in report.view().overview()["notes"] if "breaks" in note]
    assert note.startswith("metric breaks failed on ")
    assert note.endswith("ZeroDivisionError: no")
    assert _compare(golden, golden, metrics=writes).verdict == "match"  # it was given copies


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "not a callable"),
        ({"rmse": max}, "the name 'rmse' is taken"),
        ("gone.py:f", "there is no file gone.py"),
        ([max, max], "the name 'max' is taken"),
    ],
)
def test_metrics_that_make_no_sense_are_refused(given, says):
    golden = _dropped("golden")
    with pytest.raises(ld.errors.OptionError, match=says):
        _compare(golden, golden, metrics=given)


def test_limits_calibration_and_metrics_on_the_command_line(tmp_path, capsys):
    from llmdebug_nb.cli import main

    golden, mine = (str(run.path) for run in _lm_head_off_by(1.01))
    (tmp_path / "l.yaml").write_text("'*': {relative_l2: 0.02}\n", encoding="utf-8")
    (tmp_path / "m.py").write_text(
        "def off(golden, mine):\n    return float((golden - mine).abs().max())\n", encoding="utf-8"
    )
    assert main(["compare", golden, mine]) == 1
    metric = f"{tmp_path / 'm.py'}:off"
    options = ["--limits", str(tmp_path / "l.yaml"), "--calibrate", golden]
    options += ["--metric", metric, "-o", str(tmp_path / "o.csv")]
    assert main(["compare", golden, mine, *options]) == 0
    assert "fixed by l.yaml for" in capsys.readouterr().out
    assert ",off," in (tmp_path / "o.csv").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / "l.yaml").write_text("'*': {relativ_l2: 0.02}\n", encoding="utf-8")
    assert main(["compare", golden, mine, "--limits", str(tmp_path / "l.yaml")]) == 3
    assert "l.yaml, line 1: * > relativ_l2" in capsys.readouterr().err


# -- logits ---------------------------------------------------------------------------------------


@every_model
def test_logits_are_measured_row_by_row_wherever_they_come_by(architecture):
    model = MODELS[architecture]()
    report = _changed(model, scaled("lm_head", 2.0), tokens="0")
    rows = [d for d in report.differences if "kl_row_max" in d.metrics]
    assert {d.site.path for d in rows} == {"lm_head", ""}
    assert all(d.metrics["kl_row_max"] > 0 and d.metrics["top1_flips"] == 0 for d in rows)


# -- dtypes, memory and masks ---------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, coarse=False):
        super().__init__()
        self.linear, self.coarse = nn.Linear(32, 32), coarse

    def forward(self, x):
        y = self.linear(x)
        return x + torch.softmax(y.bfloat16() if self.coarse else y, -1).to(x.dtype)


def _blocks(name, coarse=(), dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(n in coarse) for n in range(4))).to(dtype)
    with ld.dump(model, name=name, mode="module+api") as run, torch.no_grad():
        model(torch.linspace(-1, 1, 8 * 32).reshape(8, 32).to(dtype))
    return run


def test_one_operator_in_bfloat16_is_no_excuse_for_bfloat16s_rounding():
    golden = _blocks("golden")
    assert _compare(golden, _blocks("half", dtype=torch.bfloat16)).verdict == "within_noise"
    assert _compare(golden, _blocks("mine", coarse=[2])).first_divergence.site.path.startswith("2")
    assert _compare(golden, _blocks("all", coarse=range(4))).verdict == "diverged"


def test_a_finer_dtype_in_some_tensors_of_mine_is_noise():
    report = _compare(_blocks("golden", coarse=range(4)), _blocks("mine", coarse=[0, 1, 3]))
    assert report.verdict == "within_noise"


class _Added(nn.Module):
    """Adds to its input, which stays in float32 under autocast."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def _added(name, rounded=(), autocast=False, factor=1.0):
    """Record eight layers. ``rounded``: those whose weights went through bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Added() for _ in range(8)))
    with torch.no_grad():
        for n in rounded:
            model[n].bfloat16().float()
        model[5].linear.weight *= factor
        with (
            ld.dump(model, name=name, weights=True) as run,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            model(torch.randn(8, 64))
    return run


def test_a_model_under_autocast_with_weights_of_half_precision_is_noise():
    golden, mine = _added("golden"), _added("mine", range(8), autocast=True)
    report = _compare(golden, mine)
    assert report.verdict == "within_noise"
    assert _compare(mine, golden).verdict == "within_noise"
    weights = [d for d in report.differences if d.site.role == "weight" and d.error]
    assert {d.pair.mine.summary.dtype for d in weights} == {"float32"}
    assert min(d.error for d in weights if d.site.slot == "weight") > 1e3 * constants.EXACT


def test_autocast_hides_no_wrong_weight():
    report = _compare(_added("golden"), _added("mine", range(8), autocast=True, factor=1.2))
    assert report.verdict == "diverged"
    assert report.findings[0].path == "5.linear"


def test_weights_that_one_layer_alone_has_rounded_are_diverged():
    report = _compare(_added("golden"), _added("mine", [5]))
    assert report.first_divergence.site.path.startswith("5.")


@given(
    st.integers(8, 64),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
@settings(deadline=None)
def test_values_tell_the_dtype_that_they_went_through(size, narrow, wide, seed):
    x = torch.randn(size, dtype=wide, generator=torch.Generator().manual_seed(seed))
    kept = x.to(narrow).to(wide)
    assert torch.finfo(narrow).eps <= rounding(kept) <= torch.finfo(torch.bfloat16).eps
    assert rounding(x.to(narrow)) == rounding(torch.full_like(x, 0.5)) == 0.0
    kept[-1] = 1 + torch.finfo(torch.float32).eps  # no narrow dtype holds it
    assert rounding(kept) == 0.0
    kept[-1] = math.inf
    assert rounding(kept) >= torch.finfo(narrow).eps


def test_a_dtype_that_is_coarser_than_at_all_siblings_is_diverged_within_any_noise():
    def layers(dtypes):
        for i, dtype in enumerate(dtypes):
            for role in ("input", "output"):
                golden = Record(
                    i, Site(f"l.{i}.f", role=role), i, "Op", Summary("float32", (8, 64))
                )
                mine = Record(i, Site(f"l.{i}.f", role=role), i, "Op", Summary(dtype, (8, 64)))
                values = {"row_error": 1e-3}
                yield Measured(i, Pair(golden, mine, "same site"), values)
        half = Record(9, Site("x", role="output"), 9, "Op", Summary("bfloat16", (8, 64)))
        full = Record(9, Site("x", role="output"), 9, "Op", Summary("float32", (8, 64)))
        yield from (
            Measured(9, Pair(full, half, "same site"), {}) for _ in range(20)
        )  # mine is coarse throughout

    odd = judging.Judging(list(layers(["bfloat16", "float16", "float16", "float16"]))).plain
    even = judging.Judging(list(layers(["bfloat16"] * 4))).plain
    assert {d.site.path for d in odd if d.rule is Rule.COARSER} == {"l.0.f"}
    assert [d for d in even if d.verdict == "diverged"] == []


def test_memory_that_was_not_written_to_is_not_compared():
    class Empty(nn.Module):
        def __init__(self, junk):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.junk = nn.Linear(4, 4), junk

        def forward(self, x):
            room = torch.empty_like(x)
            room.numpy()[:] = self.junk  # stands for what happens to lie there
            return self.linear(torch.neg(x, out=room))

    report = compared(Empty(1.0), Empty(2.0), torch.ones(2, 4), mode="module+aten")
    assert report.verdict in AGREED, report.first_divergence


def test_a_mask_of_truths_agrees_with_the_one_that_is_added():
    from llmdebug_nb.comparison import metrics

    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    added = torch.zeros(4, 4).masked_fill(~keep, torch.finfo(torch.float32).min)
    assert error_of(metrics.compare(keep, added)) == 0
    assert error_of(metrics.compare(added, keep)) == 0
    assert error_of(metrics.compare(~keep, added)) == math.inf
    assert metrics.compare(keep, keep.float())["mismatched"] == 0  # ones and zeros are no such mask


def test_statistics_alone_and_parts_are_judged_by_the_same_limits():
    model = llama()
    for options in ({"stats_only": True}, {"slice": "..., :8"}, {"reduce": "quantile:11"}):
        golden, same = (_record(model, name, **options) for name in ("golden", "same"))
        broken = copy.deepcopy(model)
        scaled("model.layers.1.mlp.act_fn", 1.001)(broken)
        assert _compare(golden, same).verdict == "match"
        report = _compare(golden, _record(broken, "mine", **options))
        assert _blamed(report) == "model.layers.1.mlp.act_fn"


def test_nothing_to_compare_in_an_empty_tensor():
    module = nn.Linear(4, 4)
    assert compared(module, module, torch.ones(0, 4)).verdict == "match"
