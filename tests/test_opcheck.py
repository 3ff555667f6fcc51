"""Each recorded operator against its reference: faults are found, correct programs are right."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.app.opcheck.checking import Checker, How
from llmdebug_nb.app.opcheck.choosing import Choice, calls_of
from llmdebug_nb.cli import main
from llmdebug_nb.comparison import standards
from llmdebug_nb.core.errors import OptionError, TensorLookupError
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.replay import checks
from llmdebug_nb.replay.checks import CallCheck, OpCheckResult, OutputCheck
from llmdebug_nb.show.spreadsheet import workbook
from llmdebug_nb.store.run import Run
from models import ARCHITECTURES, llama
from recordings import record

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


class Mlp(nn.Module):
    """Two linear layers with an activation, and a norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(F.silu(self.up(x))))


def _mlp(dtype: torch.dtype = torch.float32, **options: object) -> Run:
    torch.manual_seed(0)
    model = Mlp().to(dtype)
    given = torch.randn(4, 24, 64).to(dtype)
    return record(model, lambda: model(given), **{"mode": "api", **options})


def _adds_up(result: OpCheckResult) -> bool:
    return result.checked + sum(result.not_checked.values()) == result.total == len(result.calls)


# -- correct programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["api", "aten"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generation_with_masks_padding_and_caches_raises_no_alarm(architecture, dtype, mode):
    model = ARCHITECTURES[architecture]().to(dtype)
    ids = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]])
    run = record(
        model,
        lambda: model.generate(
            ids, attention_mask=(ids > 0).long(), max_new_tokens=2, do_sample=False
        ),
        mode=mode,
    )
    result = ld.opcheck(run).result
    assert [str(each) for each in result.wrong] == []
    assert _adds_up(result)
    assert set(result.not_checked) <= {checks.UNSET}
    assert result.checked > 0.98 * result.total


@pytest.mark.parametrize("mode", ["api", "aten"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_backward_pass_raises_no_alarm_and_is_checked(architecture, dtype, mode):
    model = ARCHITECTURES[architecture]().to(dtype)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 6, 7, 8, 9]])
    run = record(model, lambda: model(ids, labels=ids).loss.backward(), mode=mode)
    result = ld.opcheck(run).result
    assert [str(each) for each in result.wrong] == []
    assert _adds_up(result)
    backward = [each for each in result.calls if each.key.phase == "backward"]
    assert len(backward) > 40
    assert sum(bool(each.reason) for each in backward) <= 0.05 * len(backward)


# -- planted faults --------------------------------------------------------------------------------


def _lane(x: torch.Tensor) -> torch.Tensor:
    x[..., 3::8] *= 1.01
    return x


def _element(x: torch.Tensor) -> torch.Tensor:
    x[1, 2, 3] += 0.5
    return x


def _row(x: torch.Tensor) -> torch.Tensor:
    x[1, 2] *= 1.1
    return x


def _nan(x: torch.Tensor) -> torch.Tensor:
    x[0, 0, 0] = torch.nan
    return x


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "1 % wrong": lambda x: x * 1.01,
    "one lane": _lane,
    "one element": _element,
    "one row": _row,
    "NaN": _nan,
    "shifted": lambda x: x.roll(1, -1),
    "overwritten": torch.zeros_like,
}


def _plant(monkeypatch, op: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what a run holds as the outputs of an operator; roundings stay those of its dtype."""
    load = Run.load

    def changed(self, record):
        x = load(self, record)
        if record.op != op or record.site.role != "output":
            return x
        return change(x.double()).to(x.dtype)

    monkeypatch.setattr(Run, "load", changed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_activation_is_found_and_nothing_else(fault, dtype, monkeypatch):
    run = _mlp(dtype)
    _plant(monkeypatch, "Functional.silu", FAULTS[fault])
    check = ld.opcheck(run, rerun=True)
    assert check.verdict == "wrong"
    assert [each.op for each in check.wrong] == ["Functional.silu"]
    assert check.wrong[0].again == checks.RECORD_IS_WRONG


class Polar(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.polar(x.abs(), x)


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(torch.polar(x.abs(), x)).abs()


@pytest.mark.parametrize("shape", [(), (1,), (4, 24)], ids=str)
def test_wrong_complex_numbers_are_found(shape, monkeypatch):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = Spectrum() if shape else Polar()
    run = record(model, lambda: model(given), mode="api")
    assert ld.opcheck(run).verdict == "right"
    load = Run.load

    def changed(self: Run, record: Record) -> torch.Tensor:
        x = load(self, record)
        return x * 1.1 if record.op == "Torch.polar" and record.site.role == "output" else x

    monkeypatch.setattr(Run, "load", changed)
    assert "Torch.polar" in {each.op for each in ld.opcheck(run).wrong}


@pytest.mark.parametrize("op", ["Functional.linear", "Functional.silu", "Functional.layer_norm"])
def test_values_of_bfloat16_where_float32_is_expected_are_found(op, monkeypatch):
    run = _mlp()
    _plant(monkeypatch, op, lambda x: x.bfloat16())
    assert {each.op for each in ld.opcheck(run).wrong} == {op}


def test_a_result_in_a_narrower_dtype_than_the_operator_gives_is_found(monkeypatch):
    run = _mlp(mode="aten")
    load = Run.load

    def narrower(self, record):
        x = load(self, record)
        is_it = record.op == "Aten.silu" and record.site.role == "output"
        return x.bfloat16() if is_it else x

    monkeypatch.setattr(Run, "load", narrower)
    (wrong,) = ld.opcheck(run).wrong
    assert wrong.op == "Aten.silu"
    assert "its dtype is bfloat16, but the operator gives float32" in wrong.outputs[0].why


@pytest.mark.filterwarnings("ignore:.*overrid")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [lambda x: x * 1.001, _lane], ids=["0.1 %", "lane"])
def test_a_kernel_that_is_wrong_here_is_told_from_a_wrong_recording(fault, dtype):
    library = torch.library.Library("aten", "IMPL")

    def silu(x: torch.Tensor) -> torch.Tensor:
        right = x.double() / (1 + (-x.double()).exp())
        return right if x.dtype == torch.float64 else fault(right).to(x.dtype)

    library.impl("silu", silu, "CPU")
    try:
        check = ld.opcheck(_mlp(dtype), rerun=True)
    finally:
        library._destroy()
    assert [each.op for each in check.wrong] == ["Functional.silu"]
    assert check.wrong[0].again == checks.OPERATOR_IS_WRONG


def test_wrong_indices_are_found_and_ties_are_none(monkeypatch):
    scores = torch.tensor([[3.0, 1.0, 3.0, 0.0], [0.0, 5.0, 1.0, 2.0]])

    class Top(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    model = Top()
    run = record(model, lambda: model(scores), mode="api")
    assert ld.opcheck(run).verdict == "right"
    _plant(monkeypatch, "Tensor.argmax", lambda x: torch.tensor([2, 1]))
    assert ld.opcheck(run).verdict == "right"  # 3.0 stands at 0 and at 2
    monkeypatch.undo()
    _plant(monkeypatch, "Tensor.argmax", lambda x: torch.tensor([0, 3]))
    assert ld.opcheck(run).verdict == "wrong"


def test_wrong_numbers_are_no_positions_of_equal_elements(monkeypatch):
    ids = torch.tensor([[1], [1], [1]])

    class Next(nn.Module):
        def forward(self, x):
            return x + 1

    model = Next()
    run = record(model, lambda: model(ids), mode="api")
    _plant(monkeypatch, "Tensor.add", lambda x: x + 1)
    assert [each.op for each in ld.opcheck(run).wrong] == ["Tensor.add"]


def test_a_wrong_gradient_is_found(monkeypatch):
    torch.manual_seed(0)
    model = Mlp()
    run = record(model, lambda: model(torch.randn(4, 24, 64)).sum().backward(), mode="api")
    load = Run.load

    def changed(self, record):
        site, x = record.site, load(self, record)
        is_it = record.op == "Functional.silu" and (site.phase, site.role) == ("backward", "output")
        return x * 1.001 if is_it else x

    monkeypatch.setattr(Run, "load", changed)
    (wrong,) = ld.opcheck(run).wrong
    assert (wrong.op, wrong.key.phase) == ("Functional.silu", "backward")


# -- the reference is right ------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
A, B = RANDOM.standard_normal((2, 5, 8)), RANDOM.standard_normal((2, 5, 8))
W = RANDOM.standard_normal((6, 8))


def _softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def _normed(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., np.ndarray]]] = {
    "add": (lambda a, b, w: a + b, lambda a, b, w: a + b),
    "sub": (lambda a, b, w: a - b, lambda a, b, w: a - b),
    "mul": (lambda a, b, w: a * b, lambda a, b, w: a * b),
    "div": (lambda a, b, w: a / b, lambda a, b, w: a / b),
    "pow": (lambda a, b, w: a.abs().pow(1.5), lambda a, b, w: np.abs(a) ** 1.5),
    "rsqrt": (lambda a, b, w: a.abs().rsqrt(), lambda a, b, w: np.abs(a) ** -0.5),
    "exp": (lambda a, b, w: a.exp(), lambda a, b, w: np.exp(a)),
    "log1p": (lambda a, b, w: a.abs().log1p(), lambda a, b, w: np.log1p(np.abs(a))),
    "tanh": (lambda a, b, w: a.tanh(), lambda a, b, w: np.tanh(a)),
    "sigmoid": (lambda a, b, w: a.sigmoid(), lambda a, b, w: 1 / (1 + np.exp(-a))),
    "relu": (lambda a, b, w: F.relu(a), lambda a, b, w: np.maximum(a, 0)),
    "silu": (lambda a, b, w: F.silu(a), lambda a, b, w: a / (1 + np.exp(-a))),
    "gelu": (
        lambda a, b, w: F.gelu(a, approximate="tanh"),
        lambda a, b, w: a / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))),
    ),
    "softplus": (lambda a, b, w: F.softplus(a), lambda a, b, w: np.log1p(np.exp(a))),
    "softmax": (lambda a, b, w: a.softmax(-1), lambda a, b, w: _softmax(a)),
    "log_softmax": (lambda a, b, w: a.log_softmax(-1), lambda a, b, w: np.log(_softmax(a))),
    "linear": (lambda a, b, w: F.linear(a, w), lambda a, b, w: a @ w.T),
    "matmul": (lambda a, b, w: a @ b.transpose(1, 2), lambda a, b, w: a @ b.swapaxes(1, 2)),
    "einsum": (
        lambda a, b, w: torch.einsum("bik,bjk->bij", a, b),
        lambda a, b, w: np.einsum("bik,bjk->bij", a, b),
    ),
    "attention": (
        lambda a, b, w: F.scaled_dot_product_attention(a, b, a),
        lambda a, b, w: _softmax(a @ b.swapaxes(1, 2) / np.sqrt(8)) @ a,
    ),
    "layer_norm": (lambda a, b, w: F.layer_norm(a, (8,)), lambda a, b, w: _normed(a)),
    "rms_norm": (
        lambda a, b, w: F.rms_norm(a, (8,), eps=1e-6),
        lambda a, b, w: a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6),
    ),
    "mean": (lambda a, b, w: a.mean(-1), lambda a, b, w: a.mean(-1)),
    "sum": (lambda a, b, w: a.sum(1), lambda a, b, w: a.sum(1)),
    "var": (lambda a, b, w: a.var(-1), lambda a, b, w: a.var(-1, ddof=1)),
    "norm": (lambda a, b, w: a.norm(dim=-1), lambda a, b, w: np.linalg.norm(a, axis=-1)),
    "cumsum": (lambda a, b, w: a.cumsum(1), lambda a, b, w: a.cumsum(1)),
    "logsumexp": (lambda a, b, w: a.logsumexp(-1), lambda a, b, w: np.log(np.exp(a).sum(-1))),
    "maximum": (lambda a, b, w: torch.maximum(a, b), lambda a, b, w: np.maximum(a, b)),
    "where": (lambda a, b, w: torch.where(a > b, a, b), lambda a, b, w: np.where(a > b, a, b)),
    "clamp": (lambda a, b, w: a.clamp(-0.5, 0.5), lambda a, b, w: a.clip(-0.5, 0.5)),
    "cat": (lambda a, b, w: torch.cat([a, b], 1), lambda a, b, w: np.concatenate([a, b], 1)),
    "sort": (lambda a, b, w: a.sort(-1).values, lambda a, b, w: np.sort(a, -1)),
    "topk": (lambda a, b, w: a.topk(3).values, lambda a, b, w: -np.sort(-a, -1)[..., :3]),
    "flip": (lambda a, b, w: a.flip(1), lambda a, b, w: a[:, ::-1]),
    "masked": (
        lambda a, b, w: a.masked_fill(a > 0, -1e4),
        lambda a, b, w: np.where(a > 0, -1e4, a),
    ),
    "gather": (
        lambda a, b, w: a.gather(1, torch.zeros(2, 1, 8, dtype=torch.long)),
        lambda a, b, w: a[:, :1],
    ),
    "embedding": (
        lambda a, b, w: F.embedding(torch.tensor([[3, 1]]), w),
        lambda a, b, w: w[[[3, 1]]],
    ),
    "tril": (lambda a, b, w: a.tril(), lambda a, b, w: np.tril(a)),
    "conv": (
        lambda a, b, w: F.conv1d(a.transpose(1, 2), w[:, :, None]),
        lambda a, b, w: (a @ w.T).swapaxes(1, 2),
    ),
    "mse_loss": (lambda a, b, w: F.mse_loss(a, b), lambda a, b, w: ((a - b) ** 2).mean()),
}


@pytest.mark.parametrize("mode", ["api", "aten"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_reference_of_an_operator_is_that_of_numpy(name, dtype, mode):
    compute, independent = OPERATORS[name]

    class One(nn.Module):
        def forward(self, a, b, w):
            return compute(a, b, w)

    model, given = One(), [torch.tensor(x).to(dtype) for x in (A, B, W)]
    run = record(model, lambda: model(*given), mode=mode)
    checker, calls = Checker(run, How(trusted=True)), calls_of(run, Choice())
    expected = independent(*(x.double().numpy() for x in given))
    last = checker._computed(calls[-1]).exact()["0"].reshape(expected.shape)
    if dtype == torch.float32:  # a value between two operators is rounded to 16 bits otherwise
        assert np.allclose(last.double(), expected, rtol=1e-6, atol=1e-6)
    if len(calls) == 1:
        assert np.allclose(last.double(), expected, rtol=1e-12, atol=1e-12)
    checks = [checker.check(call) for call in calls]
    assert [each.verdict for each in checks] == ["right"] * len(checks)


def test_standards_are_upstreams_and_a_bool_can_pass():
    expected = {"float32": (2**-20, 99.99), "float16": (2**-10, 99.9), "bfloat16": (2**-8, 99.9)}
    for name, (limit, share) in expected.items():
        standard = standards.STANDARDS[name]
        assert (standard.limit, standard.share, standard.absolute) == (limit, share, False)
    flags = torch.tensor([True, False])
    standard = standards.standard_of(torch.bool)
    assert standards.rates(flags.double(), flags, standard).meets(standard)
    assert not standards.rates(flags.double(), ~flags, standard).meets(standard)


def test_an_element_counts_as_wrong_where_the_reference_is_zero():
    standard = standards.standard_of(torch.float32)
    found = standards.rates(torch.zeros(4).double(), torch.tensor([0.0, 0, 0, 5]), standard)
    assert found.relative == 75.0
    assert found.max_absolute == 5.0


# -- what is not checked ---------------------------------------------------------------------------


def test_what_cannot_be_checked_is_told_and_the_totals_add_up():
    class Odd(nn.Module):
        def forward(self, x):
            made = torch.empty_like(x).fill_(1.0)
            x = F.dropout(x, 0.5, training=True) + torch.rand_like(x) + made
            return torch.special.bessel_j0(x)

    model = Odd()
    run = record(model, lambda: model(torch.randn(4, 8)), mode="api")
    result = ld.opcheck(run).result
    assert _adds_up(result)
    assert result.not_checked == {checks.RANDOM: 2, checks.UNSET: 1, checks.UNKNOWN: 1}
    assert result.verdict == "right"


def test_statistics_alone_check_nothing(capsys):
    run = _mlp(stats_only=True)
    check = ld.opcheck(run)
    assert check.result.not_checked == {checks.STATISTICS: check.result.total}
    assert check.verdict == "not checked"
    assert "not checked: statistics only: 4 calls" in str(check)
    assert main(["opcheck", "-i", str(run.path)]) == 2
    assert "not checked" in capsys.readouterr().out


def test_a_gap_in_the_recording_is_told():
    run = _mlp(part="out")
    result = ld.opcheck(run).result
    assert result.checked == 0
    assert _adds_up(result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_of_torch_are_checked_where_only_they_were_recorded(dtype, monkeypatch):
    torch.manual_seed(0)
    parts = [nn.Embedding(9, 32), nn.Linear(32, 48), nn.GELU(), nn.Dropout(0.5), nn.Linear(48, 32)]
    model = nn.Sequential(*parts, nn.LayerNorm(32), nn.SiLU(), nn.Softmax(-1)).to(dtype).eval()
    ids = torch.randint(0, 9, (4, 16))
    run = record(model, lambda: model(ids).sum().backward(), mode="module", weights=True)
    result = ld.opcheck(run).result
    assert _adds_up(result)
    assert [each.key.path for each in result.wrong] == []
    forward = [each for each in result.calls if each.key.phase == "forward"]
    assert [each.verdict for each in forward] == ["right"] * 8
    assert sum(each.key.phase == "backward" and not each.reason for each in result.calls) >= 6
    _plant(monkeypatch, "LayerNorm", FAULTS["one row"])
    assert "LayerNorm" in {each.op for each in ld.opcheck(run).wrong}


def test_modules_whose_weights_or_formula_are_not_known_say_so():
    run = record(model := llama(), lambda: model(torch.tensor([[1, 2, 3]])), mode="module")
    result = ld.opcheck(run).result
    assert _adds_up(result)
    why = {each.op: (each.reason, each.detail) for each in result.calls}
    assert why["Linear"][0] == checks.GAP
    assert "weights=True" in why["Linear"][1]
    assert why["LlamaRMSNorm"][0] == checks.UNKNOWN


# -- the use case ----------------------------------------------------------------------------------


def test_filters_choose_calls_by_name_path_and_id():
    run = record(model := llama(), lambda: model(torch.tensor([[1, 2, 3]])), mode="api")
    assert {c.op for c in ld.opcheck(run, names="Linear").result.calls} == {"Functional.linear"}
    inside = ld.opcheck(run, paths="model.layers.1.mlp").result.calls
    assert len(inside) == 5
    assert all(each.key.path.startswith("model.layers.1.mlp") for each in inside)
    chosen = inside[0].id.rpartition("_")[0]
    again = ld.opcheck(run, ids=chosen).result.calls
    assert {each.key for each in inside} <= {each.key for each in again}
    with pytest.raises(OptionError, match="execution id"):
        ld.opcheck(run, ids="layer")
    with pytest.raises(OptionError, match="metrics"):
        ld.opcheck(run, metrics="cosine")
    with pytest.raises(OptionError, match="device"):
        ld.opcheck(run, device="nowhere")


def test_an_interrupted_check_goes_on_where_it_stopped(tmp_path, monkeypatch):
    run = record(model := llama(), lambda: model(torch.tensor([[1, 2, 3]])), mode="api")
    whole = ld.opcheck(run, output=tmp_path / "whole").result
    checked: list[int] = []
    check = Checker.check

    def counted(self, call):
        if len(checked) == 20:
            raise KeyboardInterrupt
        checked.append(call.record)
        return check(self, call)

    monkeypatch.setattr(Checker, "check", counted)
    with pytest.raises(KeyboardInterrupt):
        ld.opcheck(run, output=tmp_path)
    (journal,) = tmp_path.glob(".opcheck_*.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"record": 1, "ke')  # cut short, as by a kill
    before, checked[:] = set(checked), []
    monkeypatch.setattr(
        Checker, "check", lambda self, call: checked.append(call.record) or check(self, call)
    )
    again = ld.opcheck(run, output=tmp_path)
    assert len(before) == 20
    assert not before & set(checked)
    assert again.result.calls == whole.calls
    assert not list(tmp_path.glob(".opcheck_*"))
    assert sorted(path.suffix for path in tmp_path.glob("opcheck_result_*")) == [".csv", ".xlsx"]


def test_two_processes_give_what_one_gives(tmp_path):
    run = _mlp()
    one, two = (ld.opcheck(run, jobs=jobs, output=tmp_path).result for jobs in (1, 2))
    assert one.calls == two.calls
    assert one.checked == one.total == 4


def test_a_line_of_the_journal_reads_as_it_was_written():
    output = OutputCheck("0", "float32", (2, 3), "s", 99.5, False, 1e-3, None, 2.0, None, None,
                         float("inf"), float("inf"), "relative L2", "wrong")  # fmt: skip
    check = CallCheck(3, CallKey(0, 0, 1, "forward", "a/b", 2), "b", "1", "p", "t", (output,))
    assert CallCheck.read(check.line()) == check


def test_csv_and_workbook_have_upstreams_columns(tmp_path):
    check = ld.opcheck(_mlp(), metrics=["abs", "cos_sim", "kl"], output=tmp_path)
    table, book = check.paths
    rows = list(csv.reader(table.open()))
    assert rows[0][:14] == [
        "op_id", "op_name", "op_param", "tensor_path", "out_tensor_id", "precision_standard",
        "precision_result", "rel_precision_rate(%)", "max_rel_error", "abs_precision_rate(%)",
        "max_abs_error", "cosine_similarity", "kl_divergence", "fail_reason",
    ]  # fmt: skip
    assert len(rows) == 5
    assert float(rows[2][11]) > 0.9999
    with zipfile.ZipFile(book) as archive:
        sheet = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
        names = archive.read("xl/workbook.xml").decode()
    assert "addition_failed_cases" in names
    lines = [["".join(cell.itertext()) for cell in row] for row in sheet[0]]
    assert lines[0] == rows[0]
    assert [line[1] for line in lines] == [row[1] for row in rows]


def test_a_workbook_holds_any_text():
    data = workbook({"a": [["=1+1", "<&>\x00", 1.5, float("nan"), None, True]]})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        root = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    cells = list(root[0][0])
    text = "inlineStr"
    assert [cell.get("t") for cell in cells] == [text, text, None, text, None, "b"]
    assert "".join(cells[0].itertext()) == "=1+1"


def test_the_command_line_says_what_is_wrong(capsys, monkeypatch, tmp_path):
    run = _mlp()
    command = ["opcheck", "-i", str(run.path), "-o", str(tmp_path), "-rerun"]
    assert main(command) == 0
    assert "right: 0 wrong; 4 of 4 operator calls checked" in capsys.readouterr().out
    _plant(monkeypatch, "Functional.silu", FAULTS["one lane"])
    assert main([*command, "-opname", "silu", "-metric", "abs", "kl"]) == 1
    out = capsys.readouterr().out
    assert "→ /Functional.silu step 0 call 0" in out
    assert checks.RECORD_IS_WRONG in out


def test_the_script_of_a_wrong_call_runs_and_shows_the_error(monkeypatch, capsys):
    run = _mlp()
    with monkeypatch.context() as patch:
        _plant(patch, "Functional.silu", lambda x: x * 1.001)
        check = ld.opcheck(run)
        exec(compile(check.repro(), "repro", "exec"), {})
    out = capsys.readouterr().out
    assert "recorded, against float64: 0.001" in out
    with pytest.raises(TensorLookupError):
        check.repro(7)


def test_the_magic_checks_a_run_in_a_variable(ipython):
    ipython.user_ns["golden_ops"] = _mlp()
    check = ipython.run_line_magic("llmopcheck", "golden_ops --path up -j 1 -metric abs")
    assert [each.op for each in check.result.calls] == ["Functional.linear"]
    assert "Functional.linear" in check._repr_html_().replace("<wbr>", "")


def test_the_buttons_of_the_table_show_the_worst_call(monkeypatch, capsys):
    from ipywidgets import Button

    from llmdebug_nb.notebook import check_table

    run = _mlp()
    _plant(monkeypatch, "Functional.silu", FAULTS["one row"])
    table = check_table.check_table(ld.opcheck(run))
    cells = " ".join(getattr(cell, "value", "") for cell in table.children[1].children)
    assert -1 < cells.find("Functional.silu") < cells.find("Functional.linear")
    shown: list[object] = []
    monkeypatch.setattr(check_table, "display", shown.append)
    explorer, repro = [c for c in table.children[1].children if isinstance(c, Button)][:2]
    explorer.click()
    repro.click()
    assert "torch.nn.functional.silu" in capsys.readouterr().out
    assert run.record(shown[0].selected).op == "Functional.silu"


# -- msit's precision modes, and comparisons of the user's -----------------------------------------


@pytest.mark.parametrize("mode", ["force_fp16", "force_fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_are_rounded_first_are_judged_by_that_dtype(dtype, mode, monkeypatch):
    run = _mlp(dtype)
    result = ld.opcheck(run, mode=mode).result
    assert [str(each) for each in result.wrong] == []
    own = str(dtype)[6:]  # what is coarser anyway stays as it is
    expected = "float16" if mode == "force_fp16" and own == "float32" else own
    assert {o.dtype for each in result.calls for o in each.outputs} == {expected}
    _plant(monkeypatch, "Functional.silu", FAULTS["one row"])
    assert {each.op for each in ld.opcheck(run, mode=mode).wrong} == {"Functional.silu"}


def test_a_comparison_of_the_users_has_a_column_and_decides_nothing(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def farthest(golden, mine):\n    return (golden - mine).abs().max(), 'seen'\n"
        "def breaks(golden, mine):\n    raise KeyError('x')\n"
    )
    names = [f"{file}:farthest", f"{file}:breaks"]
    check = ld.opcheck(_mlp(), algorithms=names, jobs=2, output=tmp_path)
    assert check.verdict == "right"
    table = check.to_pandas()
    assert (table["alg:farthest"] < 1e-5).all()
    assert table["alg:breaks"].isna().all()
    assert table["fail_reason"].str.contains("seen").all()
    assert table["fail_reason"].str.contains("breaks fails: KeyError").all()


@pytest.mark.parametrize("text", ["nowhere.py:f", "f", "FILE:missing", "FILE:1", "BROKEN:f"])
def test_a_comparison_that_is_none_is_an_error_that_says_what_is_expected(text, tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("1 / 0\n")
    text = text.replace("FILE", f"{tmp_path}/a.py").replace("BROKEN", f"{tmp_path}/b.py")
    with pytest.raises(OptionError, match="alg: "):
        ld.opcheck(_mlp(), algorithms=text)
    with pytest.raises(OptionError, match="mode: 'force_fp17' is not known"):
        ld.opcheck(_mlp(), mode="force_fp17")
