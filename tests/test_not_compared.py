"""What was not compared is said: calls, tokens and rows without a partner never agree silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.runs import describe_run
from llmdebug_nb.comparison.differences import Coverage, Reach
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.text import run_text
from models import gpt2, llama

TEXT = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(2))


def recorded(name, model, *calls, **options):
    """Record calls of a model; each is its token ids, or its keyword arguments."""
    with torch.no_grad(), ld.dump(model, name=name, **options) as run:
        for call in calls:
            model(**call) if isinstance(call, dict) else model(call)
    return run


def first_line(report):
    return str(report).splitlines()[0]


# -- calls that were not recorded ------------------------------------------------------------------


def generated(name, model, **options):
    with ld.dump(model, name=name, **options) as run:
        model.generate(TEXT, max_new_tokens=8, do_sample=False)
    return run


def test_a_dump_says_how_many_calls_it_left_out_and_what_records_more():
    run = generated("some", llama())
    assert run.calls() == (4, 8)
    says = "4 of 8 calls recorded: tokens 0-3; record more with tokens=…"
    for text in (repr(run), describe_run(run), run_text(RunView(run))):
        assert says in text
    every = generated("every", llama(), tokens="all")
    assert every.calls() == (8, 8)
    assert "calls recorded" not in repr(every) + describe_run(every)


def test_a_dump_of_every_second_step_says_how_many_calls_it_has_and_blames_no_tokens():
    model = llama()
    with ld.dump(model, name="every_other", tokens="all", every=2) as run:
        for _ in range(4):
            model(TEXT, use_cache=False)
    assert run.calls_text() == "2 of 4 calls recorded"


def test_a_bug_in_a_call_that_was_not_recorded_is_no_plain_match():
    golden, mine = llama(), llama()
    calls = []
    mine.lm_head.register_forward_hook(
        lambda module, args, output: calls.append(1) or (output * 2 if len(calls) > 6 else None)
    )
    report = ld.compare(generated("golden", golden), generated("mine", mine))
    assert report.verdict == "match"
    assert first_line(report) == "golden against mine: match, but on only 4 of the 8 calls of both"
    assert "Recorded: 4 of the 8 calls of both; tokens= records more." in str(report)
    assert "4 of the 8 calls" in report.summary()
    whole = ld.compare(
        generated("golden", golden, tokens="all"), generated("mine", mine, tokens="all")
    )
    assert whole.verdict == "diverged"
    assert "calls" not in str(whole.coverage)


# -- tokens without a partner ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("golden", "mine", "says"),
    [
        (TEXT, TEXT[:, :9], "9 of golden's 12 tokens"),
        (TEXT[:, :9], TEXT, "9 of mine's 12 tokens"),
        (TEXT, torch.cat([OTHER, TEXT]), "12 of mine's 24 tokens"),
    ],
)
def test_a_cut_prompt_or_further_requests_are_no_plain_match(golden, mine, says):
    model = llama()
    report = ld.compare(recorded("golden", model, golden), recorded("mine", model, mine))
    assert report.verdict in ("match", "within_noise")
    assert report.caution == f"but on only {says}"
    assert f"{says} were compared." in str(report.coverage)


def test_padding_is_no_token_that_lacks_a_partner():
    model = llama()
    ids, mask = torch.cat([TEXT, OTHER]), torch.ones(2, 12, dtype=torch.int64)
    ids[1, :4] = mask[1, :4] = 0
    both = {"input_ids": ids, "attention_mask": mask}
    golden, mine = recorded("golden", model, both), recorded("mine", model, TEXT, OTHER[:, 4:])
    report = ld.compare(golden, recorded("again", model, both))
    assert (report.coverage.golden, report.caution) == (Reach((1, 1), (20, 20)), "")
    assert ld.compare(golden, mine).coverage.golden.tokens[1] == 20


def test_token_ids_of_other_shapes_that_share_nothing_have_no_partner():
    model = llama()
    golden, mine = recorded("golden", model, TEXT), recorded("mine", model, OTHER[:, :7])
    assert ld.compare(golden, mine).coverage.golden.tokens == (0, 12)


def test_coverage_says_what_each_side_has_alone():
    coverage = Coverage(1, 1, 10, 10, 0, Reach((4, 8), (3, 9)), Reach((6, 6), (3, 5)))
    assert str(coverage) == (
        "100 % of golden's 10 values and 1 of 1 result agree. 3 of golden's 9 tokens and 3 of "
        "mine's 5 tokens were compared. Recorded: 4 of golden's 8 calls; tokens= records more."
    )
    assert coverage.caution == (
        "but on only 3 of golden's 9 tokens and 3 of mine's 5 tokens and 4 of golden's 8 calls"
    )
    assert Coverage(1, 1, 10, 10).caution == ""


# -- a text in one call, and in several ------------------------------------------------------------


def decoded(name, model, first=0, **options):
    """Record a prompt and then token by token, with a cache. ``first``: position of the second."""
    with torch.no_grad(), ld.dump(model, name=name, tokens="all", **options) as run:
        out = model(TEXT[:, :6])
        for at in range(6, 12):
            places = torch.tensor([[at - 6 + first]])
            out = model(
                TEXT[:, at : at + 1], past_key_values=out.past_key_values, position_ids=places
            )
    return run


def test_decode_rows_are_compared_with_the_rows_of_one_pass_over_the_text():
    model = llama()
    whole = recorded("whole", model, TEXT)
    report = ld.compare(whole, decoded("right", model, first=6))
    assert (report.verdict, report.caution) == ("within_noise", "")
    assert "compared by text and position: 1 of mine's 1 texts, 12 positions" in str(report)
    wrong = ld.compare(whole, decoded("wrong", model, first=0))
    assert wrong.verdict == "diverged"
    assert "position" in wrong.findings[0].cause
    assert ld.compare(decoded("wrong", model), whole).verdict == "diverged"  # either way round


def test_what_a_comparison_by_tokens_leaves_out_is_said():
    model = llama()
    out = generated("some", model, tokens="0-3")
    with torch.no_grad():
        text = model.generate(TEXT, max_new_tokens=8, do_sample=False)[:, :-1]
    report = ld.compare(recorded("whole", model, text), out)
    assert report.verdict == "within_noise"
    assert report.caution == "but on only 15 of golden's 19 tokens and 4 of mine's 8 calls"


def test_statistics_alone_are_compared_step_by_step_and_the_rest_is_said():
    model = llama()
    whole = recorded("whole", model, TEXT, stats_only=True)
    report = ld.compare(whole, decoded("steps", model, first=6, stats_only=True))
    assert report.verdict == "incomparable" or "tokens" in report.caution


def test_runs_of_the_same_steps_are_compared_step_by_step():
    model = llama()
    report = ld.compare(decoded("a", model, first=6), decoded("b", model, first=6))
    assert (report.verdict, report.caution) == ("match", "")
    assert "by text and position" not in str(report)


# -- one row for all rows of a batch ---------------------------------------------------------------


def test_one_row_of_positions_for_a_padded_batch_is_a_difference_in_positions():
    model = gpt2()
    ids, mask = torch.cat([TEXT, OTHER, TEXT]), torch.ones(3, 12, dtype=torch.int64)
    mask[1, :3] = mask[2, :5] = 0
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    given = {"input_ids": ids, "attention_mask": mask}
    golden = recorded("golden", model, given | {"position_ids": places}, mode="module+api")
    report = ld.compare(golden, recorded("mine", model, given, mode="module+api"))
    rows = [d for d in report.differences if "one row of mine for all 3" in str(d.pair.fit)]
    assert rows
    assert not any("0 of 3" in str(d.pair.fit) for d in report.differences)
    assert report.first_divergence.site.path == "transformer.wpe"
    assert report.first_divergence.site.role == "input"


def test_one_row_that_is_right_for_all_rows_agrees():
    model = gpt2()
    ids = torch.cat([TEXT, OTHER, TEXT])
    places = torch.arange(12).expand(3, 12).contiguous()
    golden = recorded("golden", model, {"input_ids": ids, "position_ids": places})
    report = ld.compare(golden, recorded("mine", model, ids))
    assert report.verdict in ("match", "within_noise")
    assert report.coverage.share == 1.0


# -- other prompts ---------------------------------------------------------------------------------


def test_of_other_prompts_the_first_token_that_differs_is_named():
    model = llama()
    ids = TEXT.clone()
    ids[0, 7], ids[0, 9] = 5, 6
    report = ld.compare(recorded("golden", model, TEXT), recorded("mine", model, ids))
    evidence = report.findings[0].evidence
    assert f"token 7 of 12: {TEXT[0, 7]} in golden, 5 in mine; 2 tokens differ" in evidence
    longer = ld.compare(
        recorded("golden", model, TEXT), recorded("mine", model, torch.cat([OTHER, OTHER], 1))
    )
    says = longer.findings[0].evidence
    assert f"token 0 of 12: {TEXT[0, 0]} in golden, {OTHER[0, 0]} in mine" in says
    assert "(golden has 1 × 12 tokens, mine 1 × 24)" in says


# -- equal in effect -------------------------------------------------------------------------------


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rates", 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16))

    def forward(self, x, places):
        angles = places[:, None].float() * self.rates
        return torch.cat((angles, angles), -1).cos().to(x.dtype)


class OwnAngles(Angles):
    def forward(self, x, places):
        angles = torch.outer(places.float(), self.rates.float())
        return torch.cat((angles, angles), -1).cos().to(x.dtype)


class Turned(nn.Module):
    """Weights of bfloat16; its angles are computed in float32, whatever the dtype."""

    def __init__(self, angles):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(96, 16), nn.Linear(16, 96, bias=False)
        self.bfloat16()
        self.angles = angles

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x * self.angles(x, torch.arange(ids.shape[1])))


def turned(name, angles, tokens=300):
    ids = torch.randint(3, 96, (1, tokens), generator=torch.Generator().manual_seed(1))
    return recorded(name, Turned(angles), ids, mode="module+api")


def test_an_error_that_a_coarser_dtype_only_hides_is_not_equal_in_effect():
    rounded = OwnAngles()
    rounded.rates = rounded.rates.bfloat16()
    golden = turned("golden", Angles())
    report = ld.compare(golden, turned("mine", rounded))
    assert report.verdict == "diverged"
    assert report.findings[0].path == "angles/Tensor.mul"
    far = [d for d in report.differences if (d.error or 0.0) > 100 * (d.limit or 1.0)]
    assert far
    assert not any(d.rule is Rule.REJOINED for d in far)
    assert ld.compare(golden, turned("right", OwnAngles())).verdict in ("match", "within_noise")


def test_an_error_that_rounding_takes_away_is_equal_in_effect():
    near = OwnAngles()
    near.rates = near.rates * (1 + 1e-6)
    report = ld.compare(turned("golden", Angles()), turned("mine", near))
    assert report.verdict in ("match", "within_noise")
