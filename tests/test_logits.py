"""Logits by token: every figure beside an independent one, planted faults, clean controls."""

from __future__ import annotations

import copy
import csv
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.comparison import token_rows
from llmdebug_nb.comparison.token_rows import Judge, figures
from llmdebug_nb.core.errors import CompareError, OptionError, TensorLookupError
from models import VOCABULARY, generate, gpt2, llama, prompt
from recordings import record

NEW = 8  # tokens
rows = st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=40)


def generated(model: Any, name: str = "r", new: int = NEW, **options: Any) -> Any:
    return record(model, lambda: generate(model, new=new), name, **options)


def spoiled(model: Any, token: int = 3, factor: float = 15.0) -> Any:
    """Return a copy whose head prefers a token, so that some tokens flip."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[token] *= factor
    return other


class Words:
    def decode(self, ids: list[int]) -> str:
        return "".join(f"<w{each}>" for each in ids)


# -- figures beside independent ones ---------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.longdouble) - x.max())
    return np.asarray(e / e.sum(), dtype=np.float64)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows, st.data())
def test_the_figures_of_a_token_are_those_of_an_independent_calculation(values, data):
    g = np.array(values, np.float32)
    size = len(values)
    m = np.array(
        data.draw(st.lists(st.floats(-30, 30, width=32), min_size=size, max_size=size)), np.float32
    )
    token = data.draw(st.integers(0, size - 1))
    found = figures(torch.tensor(g), torch.tensor(m), token, top=3)
    p, q = softmax(g.astype(np.float64)), softmax(m.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = float(np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum())
    assert found.metrics["kl_divergence"] == pytest.approx(max(0, kl), rel=1e-6, abs=1e-9)
    assert np.exp(found.logprob) == pytest.approx((p[token], q[token]), rel=1e-9)
    assert found.rank == 1 + int((m > m[token]).sum())
    if g.any() and m.any():
        g64, m64 = g.astype(np.float64), m.astype(np.float64)
        cosine = g64 @ m64 / np.linalg.norm(g64) / np.linalg.norm(m64)
        assert found.metrics["cosine_similarity"] == pytest.approx(cosine, abs=1e-9)
        l1 = np.abs(m64).sum() / np.abs(g64).sum() - 1
        assert found.metrics["l1_norm"] == pytest.approx(l1, rel=1e-6, abs=1e-9)
    assert found.metrics["max_gap"] == abs(float(m.max()) - float(g.max()))
    if m.max():
        assert (
            found.metrics["ulp"] == np.spacing(np.abs(m.max()).astype(np.float32))
            or abs(m.max()) < np.finfo(np.float32).tiny
        )
    third = np.sort(m)[-3]
    order = np.argsort(-g, kind="stable")[:3]
    if len(set(g)) == size:
        assert found.lost == sum(m[each] < third for each in order)
    assert (found.best[0] != found.best[1]) == (m[found.best[0]] < m.max())
    assert g[found.best[0]] == g.max()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_the_vocabulary_changes_no_figure(values, random):
    g = torch.tensor(values)
    m = g + 0.1 * torch.arange(len(values))
    order = list(range(len(values)))
    random.shuffle(order)
    one = figures(g, m, 0, 2)
    other = figures(g[order], m[order], order.index(0), 2)
    assert one.rank == other.rank
    assert one.logprob == pytest.approx(other.logprob, rel=1e-9)
    for name in ("kl_divergence", "cosine_similarity", "l1_norm", "max_gap"):
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-7, abs=1e-9)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows)
def test_a_row_agrees_with_itself_and_kl_is_never_negative(values):
    g = torch.tensor(values)
    same = figures(g, g.clone(), None, 5)
    assert same.metrics["kl_divergence"] == pytest.approx(0, abs=1e-12)
    assert same.best[0] == same.best[1]
    assert (same.lost, same.margin) == (0, 0.0)
    assert figures(g, g.flip(0), None, 5).metrics["kl_divergence"] >= 0
    for rule in ("rounding", "msit", "tokens", "equal"):
        assert Judge(rule)(same, g, g)[0] or not g.any()


def test_mean_shift_changes_no_probability_but_the_logits():
    g = torch.tensor([1.0, 2.0, 3.0])
    found = figures(g, g + 1, None, 2)
    assert found.metrics["kl_divergence"] == pytest.approx(0, abs=1e-12)
    assert found.logprob[0] == pytest.approx(found.logprob[1])
    assert not Judge("rounding")(found, g, g + 1)[0]


def test_quantised_weights_that_a_run_states_count_as_they_round():
    g = torch.linspace(-2, 2, 64)
    m = g * 1.01
    found = figures(g, m, None, 2)
    assert not Judge("rounding")(found, g, m)[0]
    assert Judge("rounding", stated=2**-7)(found, g, m)[0]
    assert not Judge("rounding", stated=2**-14)(found, g, m)[0]


def test_equal_logits_share_a_place_and_are_no_flip():
    found = figures(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.0, 0.5]), 2, 1)
    assert found.best == (0, 0)
    assert found.rank == 1


# -- runs ------------------------------------------------------------------------------------------


def test_the_same_model_passes_every_rule():
    model = llama()
    golden, mine = generated(model, "g"), generated(copy.deepcopy(model), "m")
    for rule in ("rounding", "msit", "tokens"):
        check = ld.logits(golden, mine, rule=rule)
        assert check.verdict == "pass", check
        assert (len(check.result.tokens), check.result.left_out) == (NEW, {})


def test_bfloat16_against_float32_passes_where_rounding_is_the_rule():
    model = llama()
    mine = generated(copy.deepcopy(model).bfloat16(), "m")
    golden = generated(model, "g")
    assert ld.logits(golden, mine).verdict == "pass"
    assert ld.logits(golden, mine, rule="msit").verdict == "pass"
    assert ld.logits(golden, mine, rule="equal").verdict == "fail"


def test_behind_a_token_that_differs_nothing_is_compared_and_all_is_counted():
    model = llama()
    check = ld.logits(generated(model, "g"), generated(spoiled(model), "m"))
    first = check.first_flip
    assert check.verdict == "fail"
    assert first is not None
    assert [t.step for t in check.result.tokens] == list(range(first.step + 1))
    assert check.result.left_out == {"the tokens before it differ": NEW - first.step - 1}
    assert check.result.total == NEW
    assert f"golden '{first.best[0]}', mine '3'" in str(check)


def test_a_live_model_is_given_goldens_tokens_so_one_flip_hides_nothing():
    model = llama()
    port = spoiled(model)
    golden = generated(model, "g")
    before = {name: value.clone() for name, value in port.state_dict().items()}
    state = torch.random.get_rng_state()
    check = ld.logits(golden, port)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in port.state_dict().items())
    assert len(check.result.tokens) == NEW
    sequence = torch.cat([prompt(), torch.tensor([[t.token for t in check.result.tokens]])], 1)
    with torch.no_grad():
        expected = port(sequence).logits[0, 6:-1].softmax(-1)
        reference = model(sequence).logits[0, 6:-1].softmax(-1)
    for each, p, q in zip(check.result.tokens, reference, expected, strict=True):
        assert each.probability == pytest.approx(
            (float(p[each.token]), float(q[each.token])), rel=1e-4
        )
        assert each.best == (int(p.argmax()), int(q.argmax()))
        assert each.kl == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-2, abs=1e-6)
    assert check.result.flips
    assert all(each.best[1] == 3 for each in check.result.flips)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_model_itself_fed_with_its_own_tokens_passes(make):
    model = make()
    check = ld.logits(generated(model, "g"), model)
    assert check.verdict == "pass", check
    assert len(check.result.tokens) == NEW


def test_a_model_without_a_cache_is_fed_with_all_tokens():
    model = llama()
    golden = generated(model, "g")

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids, use_cache=False).logits

    check = ld.logits(golden, Plain())
    assert (check.verdict, len(check.result.tokens)) == ("pass", NEW)


def test_a_batch_with_padding_is_fed_with_its_mask_and_positions():
    model = llama()
    ids = prompt(batch=2)
    ids[0, :3] = 0
    mask = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
    golden = record(model, lambda: generate(model, ids, new=4, attention_mask=mask), "g")
    check = ld.logits(golden, model)
    assert (check.verdict, len(check.result.tokens)) == ("pass", 8)
    assert {t.sequence for t in check.result.tokens} == {0, 1}


def test_padding_in_front_of_a_prompt_is_no_other_prompt():
    model = llama()
    ids = prompt()
    padded = torch.cat([torch.zeros(1, 2, dtype=ids.dtype), ids], 1)
    mask = torch.cat([torch.zeros(1, 2, dtype=ids.dtype), torch.ones_like(ids)], 1)
    golden = generated(model, "g")
    mine = record(model, lambda: generate(model, padded, new=NEW, attention_mask=mask), "m")
    check = ld.logits(golden, mine)
    assert (check.verdict, len(check.result.tokens)) == ("pass", NEW)


def test_bare_calls_compare_every_row_up_to_the_first_other_token():
    model = llama()
    one, other = prompt(), prompt()
    other[0, 4] = 90
    golden, mine = (record(model, lambda i=i: model(i), n) for i, n in ((one, "g"), (other, "m")))
    check = ld.logits(golden, mine)
    assert [t.row for t in check.result.tokens] == [0, 1, 2, 3]
    assert check.verdict == "pass"
    assert check.result.left_out == {"the tokens before it differ": 3}


def test_logits_alone_count_as_greedy_until_a_token_differs():
    model = llama()
    golden, mine = generated(model, "g", logits=True), generated(spoiled(model), "m", logits=True)
    check = ld.logits(golden, mine)
    first = check.first_flip
    assert first is not None
    assert check.result.left_out == {
        "an earlier token differs, and inputs were not recorded": NEW - first.step - 1
    }
    assert "were not recorded" in str(check)
    with pytest.raises(CompareError, match="does not hold the tokens"):
        ld.logits(golden, model)


def test_steps_of_one_run_alone_are_counted():
    model = llama()
    check = ld.logits(generated(model, "g"), generated(model, "m", new=5))
    assert check.result.left_out == {"only golden has the step": NEW - 5}
    assert check.result.total == NEW
    assert check.verdict == "pass"


def test_a_padded_vocabulary_is_cut_and_the_rest_is_told():
    model = llama()
    wide = copy.deepcopy(model)
    wide.resize_token_embeddings(VOCABULARY + 32, mean_resizing=False)
    with torch.no_grad():
        wide.lm_head.weight[VOCABULARY:] = 0
    check = ld.logits(generated(model, "g"), generated(wide, "m"))
    assert check.verdict == "pass", check
    assert "vocabularies of 96 and 128 tokens: the first 96 were compared" in str(check)


def test_other_numbers_of_sequences_are_not_compared():
    model = llama()
    golden = generated(model, "g")
    mine = record(model, lambda: generate(model, prompt(batch=2), new=NEW), "m")
    check = ld.logits(golden, mine)
    assert check.verdict == "not compared"
    assert check.result.left_out == {"the numbers of sequences differ": NEW}


def test_nan_in_mine_fails_and_nan_in_both_is_not_compared():
    model = llama()
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[5] = float("nan")
    golden = generated(model, "g")
    check = ld.logits(golden, broken)
    assert check.verdict == "fail"
    assert all(t.why == "logits are NaN in one of the two only" for t in check.result.tokens)
    assert all(t.rank is None for t in check.result.tokens)
    broken.lm_head.weight.data[:] = float("nan")
    run = generated(broken, "n", new=3)
    both = ld.logits(run, run)
    assert both.verdict == "not compared"
    assert "no logit is finite in both" in both.result.left_out


def test_masked_logits_of_both_pass_and_of_one_fail():
    g = torch.tensor([1.0, 2.0, -torch.inf, 0.5])
    assert Judge("rounding")(figures(g, g.clone(), None, 2), g, g)[0]
    m = torch.tensor([1.0, 2.0, 0.0, 0.5])
    assert Judge("rounding")(figures(g, m, None, 2), g, m) == (
        False, "logits are infinite in one of the two only",
    )  # fmt: skip


# -- dumps of other tools --------------------------------------------------------------------------


def last_logits(folder: Path, logits: list[torch.Tensor]) -> Path:
    """Write what msit's ``dump_last_logits`` writes."""
    for token, each in enumerate(logits):
        place = folder / "msit_dump_20260101_000000/torch_tensors/cpu_1" / str(token)
        (place / "root.lm_head").mkdir(parents=True)
        torch.save(each, place / "root.lm_head" / "output.pth")
    return folder


def test_last_logits_of_two_engines_compare_and_the_prompts_rows_do_not_count(tmp_path):
    torch.manual_seed(0)
    golden = [torch.randn(1, 7, 50), *(torch.randn(1, 1, 50) for _ in range(3))]
    mine = [each[:, -1:].clone() for each in golden]
    mine[2][0, 0, 7] = 40.0
    check = ld.logits(last_logits(tmp_path / "a", golden), last_logits(tmp_path / "b", mine))
    assert [t.passed for t in check.result.tokens] == [True, True, False]
    assert check.first_flip.best[1] == 7
    assert sum(check.result.left_out.values()) == 1
    assert "lm_head output[0]" in str(check)


def test_files_of_logitsdump_compare_by_task_and_token(tmp_path):
    torch.manual_seed(0)
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
    for key in (3, 9):
        for token in range(2):
            logits = torch.randn(50)
            for side in ("a", "b"):
                torch.save(logits, tmp_path / side / f"logits_gsm8k_{key}_{token}.pth")
    check = ld.logits(tmp_path / "a", tmp_path / "b")
    assert (check.verdict, len(check.result.tokens)) == ("pass", 4)
    assert {(t.generation, t.step) for t in check.result.tokens} == {
        (g, s) for g in (0, 1) for s in (0, 1)
    }


def test_a_file_of_logits_against_another(tmp_path):
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    np.save(tmp_path / "logits.npy", logits.numpy())
    torch.save(logits * 1.5, tmp_path / "logits.pt")
    check = ld.logits(tmp_path / "logits.npy", tmp_path / "logits.pt", rule={"kl_divergence": 1e-3})
    assert len(check.result.tokens) == 5
    assert check.verdict == "fail"
    assert not check.result.flips


# -- rules -----------------------------------------------------------------------------------------


def test_msits_rule_is_upstreams_own(tmp_path):
    torch.manual_seed(0)
    g = torch.randn(1, 200) * 5
    for noise in (0.0, 1e-3, 0.05, 0.5):
        m = g + noise * torch.randn(1, 200)
        found = figures(g[0], m[0], None, 5)
        a, b = g[0].double().numpy(), m[0].double().numpy()
        p, q = softmax(a), softmax(b)
        near = abs(b.max() - a.max()) <= 2.0 ** np.floor(np.log2(b.max())) * 2.0**-23
        passes = near or (
            a @ b / np.linalg.norm(a) / np.linalg.norm(b) >= 0.999
            and (p * np.log(p / q)).sum() <= 1e-4
            and abs(np.abs(b).sum() / np.abs(a).sum() - 1) <= 0.01
        )
        assert Judge("msit")(found, g[0], m[0])[0] == passes, noise


def test_a_wrong_rule_metric_place_or_top_is_told():
    model = llama()
    run = generated(model, "g", new=2)
    with pytest.raises(OptionError, match="rule 'msti' is not known; nearest: msit"):
        ld.logits(run, run, rule="msti")
    with pytest.raises(OptionError, match="is not a metric"):
        ld.logits(run, run, rule={"kl_divergance": 1})
    with pytest.raises(TensorLookupError, match="has no output of floats there"):
        ld.logits(run, run, at="lm_heat")
    with pytest.raises(OptionError, match="top: 0"):
        ld.logits(run, run, top=0)
    with pytest.raises(OptionError, match="record it first"):
        ld.logits(model, model)
    with pytest.raises(OptionError, match=r"expected a run.*got int"):
        ld.logits(run, 3)
    with pytest.raises(OptionError, match="second run"):
        ld.logits("g")


def test_a_named_place_is_taken():
    run = generated(llama(), "g", new=2)
    check = ld.logits(run, run, at=("lm_head", "lm_head[0]"))
    assert [side.place for side in check.result.sides] == ["lm_head output[0]"] * 2
    assert check.verdict == "pass"


# -- nothing to compare ----------------------------------------------------------------------------


def test_a_run_without_values_or_without_logits_says_so():
    model = llama()
    stats = generated(model, "s", new=2, stats_only=True)
    check = ld.logits(stats, stats)
    assert check.verdict == "not compared"
    assert check.result.left_out == {"s: the run was recorded with statistics only": 2}
    with pytest.raises(CompareError, match="has no logits: record the model with its head"):
        ld.logits(*[record(model.model, lambda: model.model(prompt()), "b")] * 2)
    minimum = generated(model, "q", new=2, reduce="minmax")
    assert "only minmax of each tensor was kept" in str(ld.logits(minimum, minimum))


def test_a_model_that_fails_on_goldens_tokens_is_told():
    golden = generated(llama(), "g", new=2)
    small = llama(vocab_size=4)
    with pytest.raises(CompareError, match="LlamaForCausalLM fails on golden's tokens: IndexError"):
        ld.logits(golden, small)
    with ld.dump(small, name="x"):
        small(torch.zeros(1, 1, dtype=torch.long))
        with pytest.raises(CompareError, match="a recording is running"):
            ld.logits(golden, small)


# -- the same program twice ------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.dropout(self.embed(ids), 0.5))


def test_a_deterministic_model_is_equal_bit_by_bit():
    twice = ld.logits(llama(), inputs=prompt())
    assert twice.verdict == "pass"
    assert twice.first is None
    assert "all of them are equal, bit by bit" in str(twice)


def test_memory_that_nothing_has_written_yet_is_no_difference():
    model, ids = Dropping(), torch.arange(8)[None]

    def seeded():
        torch.manual_seed(0)  # dropout draws into memory that was only allocated
        return model(ids)

    twice = ld.logits(seeded)
    assert (twice.verdict, twice.unmatched) == ("pass", 0)
    assert f"{twice.compared} tensors compared" in str(twice)


def test_the_operator_that_differs_first_is_named():
    model = Dropping()
    twice = ld.logits(model, inputs={"ids": torch.arange(8)[None]})
    assert twice.verdict == "fail"
    assert "bernoulli" in twice.first.op or "dropout" in twice.first.op
    again = ld.logits(lambda: model(torch.arange(8)[None]))
    assert again.first.op == twice.first.op


def test_a_command_is_run_twice(tmp_path, capsys):
    script = tmp_path / "run.py"
    script.write_text(
        "import torch\ntorch.manual_seed(0)\n"
        "m = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))\n"
        "m(torch.arange(3)[None])\n"
    )
    line = shlex.join([sys.executable, str(script)])
    assert main(["logits", "--exec", line]) == 0
    assert "the same program twice: pass" in capsys.readouterr().out
    script.write_text(script.read_text().replace("torch.manual_seed(0)", "torch.seed()"))
    assert main(["logits", "--exec", line]) == 1


# -- front ends ------------------------------------------------------------------------------------


def test_the_command_exits_with_the_verdict_and_writes_both_files(tmp_path, capsys):
    model = llama()
    generated(model, "g")
    generated(spoiled(model), "m")
    generated(model, "s", stats_only=True)
    table, page = tmp_path / "t.csv", tmp_path / "p.html"
    assert main(["logits", "g", "g", "--rule", "msit"]) == 0
    assert main(["logits", "g", "m", "--csv", str(table), "--html", str(page)]) == 1
    assert main(["logits", "g", "s"]) == 2
    assert main(["logits", "g"]) == 3
    assert main(["logits", "g", "nowhere"]) == 3
    assert main(["logits", "g", "m", "--rule", "kl_divergence=1,cosine=-1"]) == 3
    assert main(["logits", "g", "g", "--rule", "kl_divergence=1"]) == 0
    capsys.readouterr()
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(ld.logits("g", "m").result.tokens)
    assert lines[0]["passed"] == "False"
    html = page.read_text()
    assert "default-src 'none'" in html
    assert html.count('class="fail"') >= 1
    assert "data:image/png;base64," in html


def test_texts_of_a_tokenizer_are_shown_and_escaped():
    model = llama()
    golden, mine = generated(model, "g"), generated(spoiled(model), "m")
    check = ld.logits(golden, mine, tokenizer=Words())
    assert "'<w3>'" in str(check)
    html = check._repr_html_()
    assert "&lt;w3&gt;" in html
    assert "<w3>" not in html

    class Broken:
        def decode(self, ids: list[int]) -> str:
            raise KeyError(ids[0])

    with pytest.raises(OptionError, match="can't decode the id"):
        str(ld.logits(golden, mine, tokenizer=Broken()))


def test_the_page_lists_the_worst_tokens_as_a_table():
    model = llama()
    check = ld.logits(generated(model, "g"), spoiled(model))
    html = check._repr_html_()
    assert html.count("<tr>") == 1 + min(8, len(check.result.tokens))
    most = max(t.kl for t in check.result.tokens)
    assert f"largest KL: {most:.3g} nats" in html


def test_a_token_that_a_spreadsheet_would_compute_is_text(tmp_path):
    class Formulas:
        def decode(self, ids: list[int]) -> str:
            return "=1+1"

    run = generated(llama(), "g", new=2)
    path = ld.logits(run, run, tokenizer=Formulas()).to_csv(tmp_path / "t.csv")
    assert "'=1+1" in path.read_text()


def test_the_picture_has_a_cell_for_each_token_and_a_cross_for_each_flip():
    model = llama()
    check = ld.logits(generated(model, "g"), spoiled(model))
    above, below = check.figure().axes[:2]
    assert above.images[0].get_array().shape == (1, NEW)
    crosses = [line for line in above.lines if line.get_marker() == "x"]
    assert len(crosses) == len(check.result.flips)
    assert list(below.lines[0].get_ydata()) == [t.probability[0] for t in check.result.tokens]
    with pytest.raises(OptionError, match="nothing to draw"):
        ld.logits(generated(model, "s", stats_only=True), "g").figure()


def test_an_interrupt_keeps_what_is_done(monkeypatch):
    model = llama()
    run = generated(model, "g")
    judged = []
    judge = token_rows.figures

    def once(*args: Any) -> Any:
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(1)
        return judge(*args)

    monkeypatch.setattr(token_rows, "figures", once)
    check = ld.logits(run, run)
    assert len(check.result.tokens) == 3
    assert check.result.left_out == {"interrupted": NEW - 3}
    assert check.verdict == "not compared"


def test_the_completer_offers_runs_models_and_rules(ipython):
    from llmdebug_nb.notebook.completion import _completions

    ipython.user_ns.update(golden=generated(llama(), "g", new=1), port=torch.nn.Linear(1, 1))
    words = [text for text, _ in _completions(ipython, "%llmlogits ")]
    assert {"golden", "port", "--rule"} <= set(words)
    assert ("msit", "value") in _completions(ipython, "%llmlogits golden port --rule ")


def test_the_magic_takes_runs_models_and_programs(ipython, tmp_path, capsys):
    model = llama()
    ipython.user_ns.update(golden=generated(model, "g"), port=spoiled(model), ids=prompt())
    check = ipython.run_line_magic("llmlogits", f"golden port --top 3 --html {tmp_path / 'p.html'}")
    assert (check.verdict, check.result.top) == ("fail", 3)
    assert (tmp_path / "p.html").exists()
    ipython.user_ns["model"] = model
    assert ipython.run_line_magic("llmlogits", "model --inputs ids").verdict == "pass"
    assert ipython.run_line_magic("llmlogits", "golden golden --rule equal").verdict == "pass"
