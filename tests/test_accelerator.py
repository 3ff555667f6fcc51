"""Recording on an accelerator. Where there is none, the same tests run on the CPU instead."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.weight_samples import sampled
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.kernels.summary import figures
from models import llama

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
MODES = ["module", "module+api", "module+aten", "module+api+aten"]


class Same(nn.Module):
    """Returns what it is given, as a new tensor."""

    def forward(self, x):
        return x.clone(memory_format=torch.preserve_format)


def model_there(seed: int = 0) -> nn.Module:
    return llama(seed).to(DEVICE)


def recorded(model, x, **options):
    with ld.dump(model, name="run", **options) as run:
        model(x)
    return run


def statistics(summary):
    s = summary
    return (s.min, s.max, s.mean, s.l2norm, s.nan, s.inf, s.zero)


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9), (
            got,
            expected,
        )


@pytest.mark.parametrize("stats_only", [True, False], ids=["statistics", "tensors"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 1024, 70_001])
def test_statistics_of_every_dtype_are_those_of_the_cpu(dtype, size, stats_only):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 50
    x = values.to(dtype).to(DEVICE)
    run = recorded(Same(), x, stats_only=stats_only)
    expected = figures(x.cpu())
    rows = list(run.records())
    assert len(rows) == 2
    for row in rows:
        assert row.device.startswith(DEVICE)
        assert_close(statistics(row.summary), expected)
    if not stats_only:
        kept = run.tensor("", role="output")
        assert torch.equal(kept.view(torch.uint8), x.cpu().view(torch.uint8))


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_show(spoilt):
    x = torch.randn(3, 4000, device=DEVICE)
    x[1, 7] = spoilt
    x[2, 9] = 0
    for row in recorded(Same(), x, stats_only=True).records():
        assert_close(statistics(row.summary), figures(x.cpu()))


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "sliced inside": lambda x: x[:, 5:11],
    "sliced outside": lambda x: x[3:7],
    "every second": lambda x: x[:, ::2],
    "permuted and sliced": lambda x: x.reshape(4, 8, 60).permute(1, 0, 2)[..., :30],
    "three dimensions with gaps": lambda x: x.reshape(4, 8, 60)[:, ::2, :7],
    "expanded": lambda x: x[:1].expand(5, -1),
    "from an odd byte on": lambda x: x.flatten()[1:],
    "one element": lambda x: x[3, 4],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool], ids=str)
def test_strided_tensors_have_the_statistics_of_their_elements(layout, dtype):
    x = torch.arange(32 * 60).reshape(32, 60).remainder(97).to(dtype).to(DEVICE)
    x = LAYOUTS[layout](x)
    for row in recorded(Same(), x, stats_only=True).records():
        assert_close(statistics(row.summary), figures(x.cpu()))


class InPlace(nn.Module):
    """Changes its input after a part has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x):
        seen = self.part(x)
        x.mul_(2)
        again = self.part(seen)
        x.data.add_(1)
        return again


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_a_tensor_is_recorded_as_it_was_when_it_was_seen(mode, grad):
    x = torch.full((8,), 3.0, device=DEVICE)
    with torch.set_grad_enabled(grad):
        run = recorded(InPlace(), x, stats_only=True, mode=mode)
    seen = {
        (record.site.call, record.site.role): record.summary.max
        for record in run.records()
        if record.site.path == "part"
    }
    assert seen == {(0, "input"): 3, (0, "output"): 3, (1, "input"): 6, (1, "output"): 6}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stats_only", [True, False], ids=["statistics", "tensors"])
def test_recording_changes_no_bit_of_what_a_model_generates(mode, stats_only):
    model = model_there()
    ids = torch.arange(12, device=DEVICE).reshape(2, 6) + 3

    def work():
        torch.manual_seed(7)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=True,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return [out.sequences, *out.logits], torch.rand(3, device=DEVICE)

    plain = work()
    with ld.dump(model, name="run", mode=mode, stats_only=stats_only, tokens="all") as run:
        seen = work()
    assert all(torch.equal(a, b) for a, b in zip(plain[0], seen[0], strict=True))
    assert torch.equal(plain[1], seen[1])
    assert run.info()["complete"]
    assert len({record.site.step for record in run.records()}) == 5


@pytest.mark.parametrize("mode", MODES)
def test_recording_changes_no_bit_of_a_training_step(mode):
    def work(**options):
        model = model_there().train()
        ids = torch.arange(12, device=DEVICE).reshape(2, 6) + 3
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimiser.step()
        return [p.detach().clone() for p in model.parameters()], model

    plain, _ = work()
    with ld.dump(None, name="run", mode=mode, stats_only=True) as run:
        seen, _ = work()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert any(record.site.phase == "backward" for record in run.records())
    for record in run.records():
        assert record.summary.l2norm is not None or record.summary.numel == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_samples_of_weights_there_are_their_values(dtype):
    weights = [torch.randn(shape).to(dtype) for shape in ((), (7,), (300, 5), (4, 6, 90))]
    weights += [weights[2].t(), weights[3][:, ::2]]
    assert sampled([weight.to(DEVICE) for weight in weights]) == sampled(weights)


def trained(name, device, rate=0.01, steps=4, **options):
    """Record a training of a small Llama with AdamW."""
    model = llama().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    ids = torch.randint(3, 90, (steps, 2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    with ld.dump(model, name=name, tokens="all", **options) as run:
        for batch in ids:
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def test_a_training_there_agrees_with_one_of_the_cpu():
    trained("golden", "cpu", stats_only=True)
    trained("mine", DEVICE, stats_only=True)
    assert ld.compare("golden", "mine").verdict in ("match", "within_noise")


@pytest.mark.parametrize("stats_only", [True, False], ids=["statistics", "tensors"])
def test_an_optimizer_there_is_blamed_as_an_optimizer(stats_only):
    trained("golden", DEVICE, stats_only=stats_only)
    trained("mine", DEVICE, 0.02, stats_only=stats_only)
    report = ld.compare("golden", "mine")
    assert report.verdict == "diverged"
    assert report.findings[0].cause == "weight changed otherwise"


def test_a_run_there_compares_with_one_of_the_cpu_and_a_bug_is_named():
    ids = torch.arange(6).reshape(1, 6) + 3

    def run(name, model, device):
        model = model.to(device)
        with ld.dump(model, name=name, tokens="0-2"), torch.no_grad():
            model.generate(
                ids.to(device), attention_mask=torch.ones_like(ids).to(device),
                max_new_tokens=3, do_sample=False,
            )  # fmt: skip

    run("golden", llama(), "cpu")
    run("mine", llama(), DEVICE)
    report = ld.compare("golden", "mine")
    assert report.verdict in ("match", "within_noise")
    wrong = llama()
    with torch.no_grad():
        wrong.model.layers[1].mlp.up_proj.weight[3] *= 1.5
    run("wrong", wrong, DEVICE)
    report = ld.compare("golden", "wrong")
    assert report.verdict == "diverged"
    assert "layers.1.mlp.up_proj" in str(report.findings[0].path)


def test_recordings_of_two_runs_there_are_equal():
    model = model_there()
    for name in ("a", "b"):
        with ld.dump(model, name=name, stats_only=True, mode="module+aten"):
            generate_there(model)
    assert ld.compare("a", "b").verdict == "match"


def generate_there(model, new: int = 3):
    ids = torch.arange(6, device=DEVICE).reshape(1, 6) + 3
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )


@needs_cuda
def test_nothing_of_a_recording_stays_in_the_memory_of_the_device():
    model = model_there()
    generate_there(model)
    with ld.dump(model, name="first", stats_only=True, mode="module+aten"):
        generate_there(model)
    del model
    gc.collect()
    model = model_there()
    generate_there(model)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with ld.dump(model, name="second", stats_only=True, mode="module+aten") as run:
        generate_there(model)
    del run
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@needs_cuda
def test_what_runs_on_another_stream_is_recorded_as_it_is():
    model, side = Same(), torch.cuda.Stream()
    big = torch.randn(4096, 4096, device=DEVICE)
    with ld.dump(model, name="run", stats_only=True) as run:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = big
            for _ in range(50):  # the values are ready late
                x = x @ big / 64
            model(x)
    torch.cuda.synchronize()
    assert_close(statistics(next(iter(run.records())).summary), figures(x.cpu()))


@needs_cuda
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stats_only", [True, False], ids=["statistics", "tensors"])
def test_capturing_a_graph_is_not_disturbed_and_what_is_missing_is_said(mode, stats_only):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(DEVICE)
    x = torch.randn(4, 8, device=DEVICE)
    with torch.no_grad():
        expected = model(x)
        graph = torch.cuda.CUDAGraph()
        with ld.dump(model, name="run", mode=mode, stats_only=stats_only) as run:
            model(x)
            with torch.cuda.graph(graph):
                out = model(x)
            graph.replay()
    del run
    gc.collect()
    torch.randn(1 << 20, device=DEVICE)  # takes memory that the recording had
    x.copy_(torch.randn(4, 8))
    graph.replay()
    expected = model(x)
    assert torch.equal(out, expected)
    run = ld.open_run("run")
    # the capture itself makes memory for the state of random numbers, to which nothing is written
    records = [each for each in run.records() if not each.site.path.startswith("/")]
    values = {record.site.step: record.summary.l2norm for record in records}
    assert values[0] is not None
    assert values[1] is None
    lost = [record.lost for record in records if record.site.step == 1]
    assert all("CUDA graph" in why for why in lost)
    assert run.info()["lost"] >= len(lost)


@needs_cuda
def test_a_compiled_model_is_recorded_by_its_fused_kernels():
    ids = torch.arange(6, device=DEVICE).reshape(1, 6) + 3
    model = model_there()
    with torch.no_grad():
        with ld.dump(model, name="golden", mode="aten"):
            model(ids, use_cache=False)
        plain = model(ids, use_cache=False).logits
        try:
            with ld.dump(model, name="fused", graph="fused"):
                seen = model(ids, use_cache=False).logits
        except CaptureError as error:
            pytest.skip(str(error))  # an older PyTorch
    torch.testing.assert_close(seen, plain)
    assert ld.compare("golden", "fused").verdict in ("match", "within_noise")


@needs_cuda
def test_a_model_compiled_to_cuda_graphs_is_recorded_eagerly_and_runs_on_afterwards():
    ids = torch.arange(6, device=DEVICE).reshape(1, 6) + 3
    model = model_there()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        plain = [compiled(ids, use_cache=False).logits.clone() for _ in range(4)]
        with ld.dump(compiled, name="run", tokens="all", force_eager=True) as run:
            seen = [compiled(ids, use_cache=False).logits.clone() for _ in range(4)]
        after = compiled(ids, use_cache=False).logits.clone()
    for one in [*plain[1:], *seen, after]:
        torch.testing.assert_close(one, plain[0])
    assert next(iter(run.records()), None) is not None


def test_runs_that_draw_other_random_numbers_there_are_told():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)).to(DEVICE).train()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for name in ("a", "b"):
        with ld.dump(model, name=name):
            model(x)
    assert ld.compare("a", "b").verdict == "nondeterministic"


class Overflowing(nn.Module):
    """A module between two others that overflows in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(torch.exp(self.first(x) * 100).half())


def test_an_overflow_there_is_found_by_errcheck():
    model = Overflowing().to(DEVICE).half()
    x = torch.randn(2, 8, device=DEVICE).half()
    with torch.no_grad(), ld.errcheck(model) as check:
        model(x)
    faults = [fault for _, fault in check.result.faults]
    assert any(fault.kind == "overflow" and "exp" in fault.call.path for fault in faults)


def test_operators_recorded_there_are_checked_here_and_there():
    model = model_there()
    with torch.no_grad(), ld.dump(model, name="run", mode="aten") as run:
        model(torch.arange(6, device=DEVICE).reshape(1, 6), use_cache=False)
    assert ld.opcheck(run).verdict == "right"
    assert ld.opcheck(run, device=DEVICE, dtype="float64").verdict == "right"
    assert ld.opcheck(run, rerun=True).verdict == "right"


def test_two_models_run_in_lockstep_here_and_there():
    ids = torch.arange(6).reshape(1, 6)
    golden, mine, wrong = llama(), model_there(), llama()
    with torch.no_grad():
        wrong.model.layers[1].mlp.up_proj.weight[3] *= 1.5

    def work(model):
        with torch.no_grad():
            model(ids.to(model.device), use_cache=False)

    assert ld.lockstep(golden, mine, work).verdict in ("match", "within_noise")
    report = ld.lockstep(golden, wrong.to(DEVICE), work)
    assert "layers.1.mlp.up_proj" in str(report.findings[0].path)


def test_the_sensitivity_of_a_model_there_is_measured():
    model = model_there()
    found = ld.perturb(model, torch.arange(6, device=DEVICE).reshape(1, 6), kinds="ulp", top=3)
    assert len(found.rows) > 0


def test_a_part_of_a_tensor_and_logits_and_overflowing_calls_are_recorded_there():
    model = model_there()
    with ld.dump(model, name="slice", slice="[0,-1]") as run:
        generate_there(model)
    assert run.info()["payloads"] > 0
    with ld.dump(model, name="logits", logits=True) as run:
        generate_there(model)
    assert run.tensor("lm_head", step=1).shape[-1] == model.config.vocab_size
    bad = Overflowing().to(DEVICE).half()
    with torch.no_grad(), ld.dump(bad, name="overflow", overflow=1) as run:
        bad(torch.randn(2, 8, device=DEVICE).half() * 10)
    assert {record.site.path for record in run.records()} <= {"", "last"}


def test_the_last_steps_of_a_long_run_there_are_kept_when_a_nan_comes():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE)
    x = torch.randn(2, 8, device=DEVICE)
    with torch.no_grad(), ld.dump(model, name="run", last=2, alarm="nan", tokens="all") as run:
        for step in range(6):
            if step == 4:
                x[0, 0] = math.nan
            model(x)
    assert max(record.site.step for record in run.records()) >= 4
    assert len({record.site.step for record in run.records()}) <= 4
