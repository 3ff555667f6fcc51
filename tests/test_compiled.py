"""Code compiled by `torch.compile`: graph nodes, the kernels' buffers, and blamed kernels."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb import torchair
from llmdebug_nb.app.runs import describe_run
from llmdebug_nb.capture.compiled.fusion_switches import RULES, FusionSwitch
from llmdebug_nb.core.places import shown
from recordings import AGREED

MODEL_DIM = 32


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MODEL_DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.up = nn.Linear(MODEL_DIM, 2 * MODEL_DIM)
        self.down = nn.Linear(2 * MODEL_DIM, MODEL_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x))
            if self.broken:
                torch._dynamo.graph_break()
        return x


@pytest.fixture(autouse=True)
def _runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMDEBUG_RUNS", str(tmp_path / "runs"))
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    """Kernels are compiled once for all tests, into a place of their own."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    yield
    if before is None:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def model(**how) -> Model:
    torch.manual_seed(0)
    return Model(**how)


def example(rows: int = 6) -> torch.Tensor:
    return torch.randn(4, rows, MODEL_DIM, generator=torch.Generator().manual_seed(rows))


def steps(run) -> list[int]:
    return [
        step for (step,) in run.index.query(tuple, "SELECT DISTINCT step FROM rows ORDER BY step")
    ]


def paths(run) -> set[str]:
    return {record.site.path for record in run.records()}


# -- the graph, node by node ----------------------------------------------------------------------


@torch.no_grad()
def test_an_fx_dump_equals_eager_code_bit_for_bit_and_operator_by_operator():
    net, x = model(), example()
    with ld.dump(net, name="eager", mode="aten"):
        expected = net(x)
    with ld.dump(net, name="fx", graph="fx") as run:
        assert torch.equal(net(x), expected)
    report = ld.compare("eager", "fx")
    assert report.verdict == "match"
    operators = {r.site.path for r in ld.open_run("eager").records() if "/" in r.site.path}
    assert operators <= paths(run)
    assert "layers.1.norm/Aten.rsqrt" in operators
    paired = [d for d in report.differences if d.pair.golden and d.pair.mine and "/" in d.site.path]
    assert {d.site.path for d in paired} == operators


def test_a_compiled_training_step_keeps_its_bits_and_records_its_backward_graph():
    def step(net):
        torch.manual_seed(1)
        loss = net(example()).square().mean()
        loss.backward()
        return loss.detach(), torch.get_rng_state(), [p.grad for p in net.parameters()]

    plain, recorded = model(dropout=0.5).train(), model(dropout=0.5).train()
    expected = step(plain)
    with ld.dump(recorded, name="fx", graph="fx") as run:
        got = step(recorded)
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])
    assert all(torch.equal(a, b) for a, b in zip(expected[2], got[2], strict=True))
    backward = run.operators().query("phase == 'backward'")
    assert "layers.1.up/Aten.mm" in set(backward["path"])
    assert "layers.1.up/Aten.addmm" in set(backward["forward_path"].dropna())


@torch.no_grad()
def test_every_node_names_its_module_and_its_source_line():
    net = model()
    with ld.dump(net, name="fx", graph="fx") as run:
        net(example())
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
        if "torch.rsqrt(" in text
    )
    assert run.stack("layers.1.norm/Aten.rsqrt")[0] == f"{shown(__file__)}:{line} forward"
    assert {"layers.0.norm/Aten.rsqrt", "layers.0/Aten.silu", "layers.1.down/Aten.addmm"} <= paths(
        run
    )


@torch.no_grad()
def test_if_inductor_lacks_an_internal_the_graph_runs_node_by_node_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    monkeypatch.delattr(PythonWrapperCodegen, "generate_kernel_call")
    net, x = model(), example()
    expected = net(x)
    with ld.dump(net, name="k", graph="fused") as run:
        assert torch.equal(net(x), expected)  # as eager code, which Inductor's is not
    assert "layers.1.norm/Aten.rsqrt" in paths(run)
    (problem,) = run.meta["problems"]
    assert (
        f"PyTorch {torch.__version__} has no PythonWrapperCodegen.generate_kernel_call" in problem
    )
    assert "node by node instead" in problem
    assert "node by node instead" in describe_run(run)
    with ld.dump(net, name="both", graph="both"):
        net(x)
    assert "node by node instead" in describe_run(ld.open_run("both"))


@pytest.mark.parametrize("broken", [False, True])
def test_steps_are_calls_of_the_model_whatever_the_number_of_graphs(broken: bool):
    net = model(broken=broken)
    with ld.dump(net, name="fx", graph="fx", tokens="0,2-3") as run:
        for rows in (6, 6, 9, 11):
            net(example(rows))
    assert steps(run) == [0, 2, 3]
    count = run.index.query(
        tuple,
        "SELECT step, count(*) FROM rows WHERE path = 'layers.1.norm/Aten.rsqrt' AND role = "
        "'output' GROUP BY step",
    )
    assert count == [(0, 1), (2, 1), (3, 1)]


@torch.no_grad()
def test_filters_by_layer_operator_and_part_hold_for_graphs():
    net = model()
    with ld.dump(
        net, name="fx", graph="fx", layers="layers.1", apis="rsqrt,silu", part="out"
    ) as run:
        net(example())
    assert {(r.site.path, r.site.role) for r in run.records()} == {
        ("layers.1.norm/Aten.rsqrt", "output"),
        ("layers.1/Aten.silu", "output"),
    }


@torch.no_grad()
def test_the_model_is_as_it_was_after_the_block_also_after_an_error():
    net, x = model(), example()
    expected, before = net(x), dict(vars(net))
    with contextlib.suppress(KeyError), ld.dump(net, name="fx", graph="fx"):
        net(x)
        raise KeyError("theirs")
    assert vars(net) == before
    assert not net._forward_hooks
    assert torch.equal(net(x), expected)
    assert ld.open_run("fx").info()["ended_by"] == "KeyError"


@torch.no_grad()
@pytest.mark.parametrize("form", ["module", "forward", "in place"])
def test_a_backend_records_however_the_model_is_compiled_and_lets_it_run_on_after_stop(form: str):
    net, x = model(), example()
    expected = net(x)
    backend = ld.fx_backend(name="fx")
    call = net
    if form == "module":
        call = torch.compile(net, backend=backend)
    elif form == "forward":
        net.forward = torch.compile(net.forward, backend=backend)
    else:
        net.compile(backend=backend)
    for _ in range(3):
        assert torch.equal(call(x), expected)
    run = backend.stop()
    records = len(run)
    assert torch.equal(call(x), expected)
    assert len(ld.open_run("fx")) == records
    assert steps(run) == [0, 1, 2]
    roots = run.index.query(
        tuple, "SELECT role, group_concat(step) FROM rows WHERE path = '' GROUP BY role"
    )
    assert roots == [("input", "0,1,2"), ("output", "1,2")]
    assert "the result of the model's first call is missing" in describe_run(run)


@torch.no_grad()
def test_a_compiled_function_is_a_root_too_and_each_call_of_it_a_step():
    net, backend = model(), ld.fx_backend(name="fx")

    @torch.compile(backend=backend)
    def score(x):
        return net(x).sum()

    for rows in (6, 6, 7):
        score(example(rows))
    run = backend.stop()
    assert steps(run) == [0, 1, 2]
    assert {"/Aten.sum", "layers.0.norm/Aten.rsqrt"} <= paths(run)


@torch.no_grad()
def test_two_recordings_in_one_place_are_two_runs(tmp_path: Path):
    net = model()
    for _ in range(2):
        config = torchair.get_fx_dump_config(tmp_path)
        torch.compile(net, backend=config.backend)(example())
        run = config.stop()
    assert sorted(
        folder.name for folder in tmp_path.iterdir() if folder.name.startswith("msit")
    ) == [
        "msit_fx_dump",
        "msit_fx_dump.2",
    ]
    assert run.path == tmp_path / "msit_fx_dump.2"


def test_generate_of_a_compiled_module_is_reported_as_uncompiled():
    from tests.models import llama

    net, backend = llama(), ld.fx_backend(name="fx")
    compiled = torch.compile(net, backend=backend)
    compiled.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=2, do_sample=False)
    with pytest.raises(
        ld.errors.EmptyDumpError,
        match=r"generate\(\) of what torch.compile returned runs the model uncompiled",
    ):
        backend.stop()


def test_generate_of_a_model_whose_forward_is_compiled_counts_its_tokens():
    from tests.models import llama

    net = llama()
    prompt = torch.tensor([[3, 5, 7]])
    expected = net.generate(prompt, max_new_tokens=3, do_sample=False)
    with ld.dump(net, name="fx", graph="fx") as run:
        assert torch.equal(net.generate(prompt, max_new_tokens=3, do_sample=False), expected)
    assert [(call.step, call.kind) for call in run.root_calls()] == [
        (0, "prefill"),
        (1, "decode"),
        (2, "decode"),
    ]
    assert {r.site.step for r in run.records(path="lm_head/Aten.mm")} == {0, 1, 2}


def test_uncompiled_calls_in_the_block_are_reported():
    net = model()
    with ld.dump(net, name="fx", graph="fx") as run, torch.compiler.set_stance("force_eager"):
        net(example())
    assert "a call of Model ran uncompiled" in describe_run(run)
    assert not run.info()["complete"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"graph": "ge"}, "graph 'ge' is not known; known: fx, fused, both"),
        ({"graph": "fx", "mode": "aten"}, "leave mode out"),
        ({"graph": "fx", "fusion_switch": {}}, "graph='fx' makes none"),
        ({"fusion_switch": {}}, "say graph='fused'"),
        ({"graph": "fused", "compiler_config": 3}, "expected a mapping of Inductor's settings"),
        ({"graph": "fused", "compiler_config": {"max_fusion_sizes": 3}},
            "no setting 'max_fusion_sizes'; nearest: max_fusion_size"),
        ({"graph": "fused", "fusion_switch": "no.json"}, "expected a JSON file such as"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_for_graphs_are_refused(options, says: str):
    with pytest.raises(ld.errors.OptionError, match=re.escape(says)):
        ld.dump(model(), name="x", **options).start()


def test_compiling_needs_a_named_model():
    with pytest.raises(ld.errors.OptionError, match=r"name it, as in dump\(model, graph='fx'\)"):
        ld.dump(graph="fx")


# -- the kernels ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fused(inductor: None, tmp_path_factory: pytest.TempPathFactory):
    """Return two steps of one model: plain Inductor's outputs, the recorded ones, run, folder."""
    folder = tmp_path_factory.mktemp("fused")
    net = model()
    torch._dynamo.reset()
    with torch.no_grad():
        plain = torch.compile(net)
        expected = [plain(example()), plain(example())]
        torch._dynamo.reset()
        with ld.dump(net, name="k", graph="both", path=folder) as run:
            got = [net(example()), net(example())]
        with ld.dump(net, name="fx", graph="fx", path=folder):
            net(example()), net(example())
    return expected, got, run, folder


def test_observing_kernels_changes_no_bit_of_inductors_results(fused):
    expected, got, _, _ = fused
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_every_buffer_is_mapped_to_a_node_and_agrees_with_it_up_to_rounding(fused):
    _, _, run, folder = fused
    for golden in ("k.fx", "fx"):
        report = ld.compare(folder / golden, run)
        written = [
            d
            for d in report.differences
            if d.site.role == "output" and "/" in d.site.path and d.pair.mine
            if not d.pair.elsewhere
        ]
        assert report.verdict in AGREED
        assert (
            len(written) == 2 * 11
        )  # two norms (sum and result), two activations, four products, the last sum
        assert all(d.pair.golden is not None for d in written)


def test_a_buffer_that_holds_the_sum_of_a_mean_is_understood(fused):
    _, _, run, folder = fused
    report = ld.compare(folder / "k.fx", run)
    sums = [
        d
        for d in report.differences
        if d.pair.mine and d.pair.mine.site.slot == f"0 sum of {MODEL_DIM}"
    ]
    assert len(sums) == 4
    for d in sums:
        assert d.verdict in AGREED
        assert d.pair.fit.says == f"mine's is the sum over {MODEL_DIM}, divided before comparing"
        golden, mine = ld.open_run(folder / "k.fx").load(d.pair.golden), run.load(d.pair.mine)
        assert torch.allclose(golden, mine / MODEL_DIM, atol=1e-6)


def test_a_kernel_is_kept_with_its_nodes_and_its_code(fused):
    _, _, run, _ = fused
    kernels = {
        name: (nodes.split(", "), source)
        for name, nodes, source in run.index.query(tuple, "SELECT * FROM all_kernels")
    }
    name = next(name for name in kernels if "silu" in name and "#" not in name)
    assert {"exp", "neg", "div"} <= set(kernels[name][0])
    assert "exp(" in kernels[name][1]
    assert kernels["graph0/extern:extern_kernels.addmm"][1] == ""
    assert "addmm_3" in kernels["graph0/extern:extern_kernels.addmm#4"][0]


@torch.no_grad()
def test_a_buffer_is_shown_with_the_kernel_that_writes_it(fused):
    _, _, _, folder = fused
    view = ld.compare(folder / "k.fx", folder / "k").view()
    row = next(
        d.index for d in view.differences if d.pair.golden and d.pair.mine and d.op == "Aten.silu"
    )
    golden, mine = view.detail({"op": "detail", "row": row})["sides"][:2]
    assert golden["kernel"] is None  # of the graph, no kernel is called
    assert mine["kernel"] is not None
    assert "silu" in mine["kernel"]["name"]
    assert "cpp_prefix" in mine["kernel"]["code"] or "cpp_fused" in mine["kernel"]["code"]
    assert mine["kernel"]["nodes"]


# 1 / sqrt(x) as kernels have it on processors without and with vectors, and 1 % more
ROOTS = {
    "1 / std::sqrt(": "1.01f / std::sqrt(",
    ".rsqrt()": ".rsqrt() * at::vec::Vectorized<float>(1.01f)",
}


def test_a_wrong_kernel_is_named_with_its_nodes_module_and_line(
    monkeypatch: pytest.MonkeyPatch, fused
):
    from torch._inductor.codegen.cpp import CppScheduling

    original, seen = CppScheduling.define_kernel, []

    def wrong(self, source, nodes, *rest):
        if any(root in source for root in ROOTS):
            seen.append(1)
            for right, spoilt in ROOTS.items() if len(seen) == 2 else ():
                source = source.replace(right, spoilt)
        return original(self, source, nodes, *rest)

    monkeypatch.setattr(CppScheduling, "define_kernel", wrong)
    net = model()
    with ld.dump(net, name="wrong", graph="both"):
        net(example()), net(example())
    assert len(seen) == 2
    for golden in ("wrong.fx", fused[3] / "fx"):
        report = ld.compare(golden, "wrong")
        assert report.verdict == "diverged"
        (finding,) = report.findings
        # with vectors, the kernel keeps the root as well, and that is where it goes wrong
        assert finding.path in ("layers.1.norm/Aten.mul.Tensor", "layers.1.norm/Aten.rsqrt")
        assert finding.cause == "introduced"
        assert finding.kernel.name.startswith("graph0/cpp_fused_add_mean_mul_pow_rsqrt_view")
        assert "rsqrt_1" in finding.kernel.nodes
        assert any(spoilt in finding.kernel.source for spoilt in ROOTS.values())
        assert finding.kernel.name in finding.evidence
        assert "test_compiled.py" in finding.source


class Mirrored(nn.Module):
    """Writes to its input, which torch 2.13 fuses wrongly on the CPU (PyTorch issue 198270)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x.index_put_((index,), values * self.scale)
        x.add_(x.flip(0))
        return x


@torch.no_grad()
def test_the_fused_kernel_that_reads_what_it_has_already_overwritten_is_found(inductor):
    torch.manual_seed(0)
    net, x, index, values = (
        Mirrored(),
        torch.randn(4096),
        torch.randperm(4096)[:64],
        torch.randn(64),
    )
    right, wrong = net(x.clone(), index, values), torch.compile(net)(x.clone(), index, values)
    if torch.equal(right, wrong):
        pytest.skip("this version of PyTorch computes it rightly")
    with ld.dump(net, name="eager", mode="aten"):
        net(x.clone(), index, values)
    with ld.dump(net, name="k", graph="both"):
        assert not torch.equal(
            net(x.clone(), index, values), right
        )  # which wrong values depends on the threads
    for golden in ("eager", "k.fx"):
        (finding,) = ld.compare(golden, "k").findings
        assert {"index_put", "rev", "add", "copy_"} <= set(finding.kernel.nodes)
        assert "flip_index_put" in finding.kernel.name


@torch.no_grad()
def test_with_all_fusion_off_every_operator_is_its_own_kernel_and_bits_are_those_of_eager_code(
    tmp_path: Path,
):
    net, x = model(), example()
    switch = tmp_path / "switch.json"
    switch.write_text(
        json.dumps({"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}),
        encoding="utf-8",
    )
    expected = net(x)
    with ld.dump(net, name="off", graph="fused", fusion_switch=switch) as run:
        assert torch.equal(net(x), expected)
    assert all(
        "extern:" in name for (name,) in run.index.query(tuple, "SELECT name FROM all_kernels")
    )
    with ld.dump(net, name="eager", mode="aten"):
        net(x)
    report = ld.compare("eager", "off")
    assert report.verdict == "match"
    assert {"layers.0.norm/Aten.rsqrt", "layers.0/Aten.silu"} <= {
        d.site.path for d in report.differences if d.verdict == "match"
    }


@torch.no_grad()
def test_ge_config_takes_the_parameters_that_msit_has(tmp_path: Path):
    net = model()
    config = torchair.get_ge_dump_config(
        dump_path=tmp_path, dump_mode="output", fusion_switch_file=None, dump_token=[1],
            dump_layer="layers.1",
        compiler_config={"fallback_by_default": True},
    )  # fmt: skip
    call = torch.compile(net, backend=config.backend)
    for _ in range(3):
        call(example())
    run = config.stop()
    assert steps(run) == [1]
    assert {r.site.role for r in run.records()} == {"output"}
    assert {r.site.path.partition("/")[0].split(".")[0:2][-1] for r in run.records()} == {"1"}
    with pytest.raises(
        ld.errors.OptionError, match="dump_mode 'inputs' is not known; known: input, output, all"
    ):
        torchair.get_ge_dump_config(tmp_path, dump_mode="inputs")
    with pytest.raises(ld.errors.OptionError, match="compiler_config: expected a CompilerConfig"):
        torchair.get_fx_dump_config(tmp_path, compiler_config=[])


@torch.no_grad()
@pytest.mark.parametrize(
    ("named", "operators"),
    [
        (["Add", "Silu_1"], {"add", "addmm", "silu"}),
        (["MatMulV2", "Swish"], {"mm", "addmm", "silu"}),
        ("ReduceMean", {"mean"}),
    ],
)
def test_dump_layer_names_operators_as_ge_does(inductor: None, tmp_path: Path, named, operators):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = torchair.get_ge_dump_config(tmp_path, dump_layer=named)
    assert any("numbers are those of GE's" in str(one.message) for one in said) == (
        "Silu_1" in named
    )
    torch.compile(model(), backend=config.backend)(example())
    found = {r.site.path.rpartition("/Aten.")[2].partition(".")[0] for r in config.stop().records()}
    assert found
    assert found <= operators
    with pytest.raises(ld.errors.OptionError, match="'Add' is an operator, others are modules"):
        torchair.get_ge_dump_config(tmp_path, dump_layer=["Add", "layers.1"])


def test_a_compiler_config_of_torchair_is_taken_and_its_settings_are_said_to_have_no_effect(
    tmp_path: Path,
):
    class CompilerConfig:
        def __init__(self) -> None:
            self.mode = "max-autotune"
            self.experimental_config = object()

    for make in (torchair.get_fx_dump_config, torchair.get_ge_dump_config):
        with pytest.warns(UserWarning, match="settings experimental_config, mode of Compil"):
            config = make(tmp_path, compiler_config=CompilerConfig())
        assert callable(config.backend)
    assert callable(torchair.get_ge_dump_config(tmp_path, compiler_config=config).backend)


# -- the fusion switch ----------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from([*RULES["UBFusion"], "ALL"]), st.sampled_from(["on", "off"]))
)
def test_a_rule_that_is_on_stays_on_and_all_applies_to_the_others(rules):
    switch = FusionSwitch.read({"Switch": {"UBFusion": rules}})
    everything = rules.get("ALL") == "off"
    for rule in ("vertical", "horizontal"):
        assert getattr(switch, rule) == (
            rules.get(rule) == "on" or (rule not in rules and not everything)
        )
    assert switch.config.get("epilogue_fusion", True) == (
        rules.get("epilogue") == "on" or ("epilogue" not in rules and not everything)
    )


@pytest.mark.parametrize(
    ("switch", "says"),
    [
        ([], "expected a mapping with the key Switch"),
        ({"Switch": {"GraphFusions": {}}}, "there is no 'GraphFusions'; nearest: GraphFusion"),
        ({"Switch": {"GraphFusion": {"batch": "off"}}},
            "GraphFusion has no rule 'batch'; nearest: batch_fusion"),
        ({"Switch": {"UBFusion": {"aten.rsqrts": "off"}}}, "UBFusion has no rule 'aten.rsqrts'"),
        ({"Switch": {"UBFusion": {"vertical": False}}}, "expected 'on' or 'off'"),
        ({"Switch": {"UBFusion": "off"}}, "expected a mapping such as"),
    ],
)  # fmt: skip
def test_an_invalid_switch_is_refused_with_the_valid_ones(switch, says: str):
    with pytest.raises(ld.errors.OptionError, match=re.escape(says)):
        FusionSwitch.read(switch)


def test_an_operator_can_be_kept_out_of_all_kernels():
    assert FusionSwitch.read({"Switch": {"UBFusion": {"aten.rsqrt": "off"}}}).apart == {
        "aten.rsqrt"
    }


# -- torchair's folders ---------------------------------------------------------------------------


def fields(message: bytes) -> dict[int, list[int | bytes]]:
    """Return the fields of a protobuf message by number: whole numbers and bytes."""
    found: dict[int, list[int | bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        value: int | bytes = number()
        if key & 7 == 2:
            at += value
            value = message[at - value : at]
        else:
            assert key & 7 == 0
        found.setdefault(key >> 3, []).append(value)
    return found


def test_a_run_is_written_in_the_folders_of_fx_dumps_of_both_generations(fused, tmp_path: Path):
    run = ld.open_run(fused[3] / "fx")
    written = torchair.convert(run, tmp_path / "new")
    token = tmp_path / "new" / "worldsize1_global_rank0" / "Model" / "1"
    (file,) = token.glob("rsqrt_1-aten.rsqrt.default.OUTPUT.0.*.npy")
    assert np.array_equal(np.load(file), run.tensor("layers.1.norm/Aten.rsqrt", step=1).numpy())
    assert written.tensors == len(list((tmp_path / "new").rglob("*.npy")))
    assert set(written.left_out) <= {"that are no inputs or outputs of operators"}  # the model's
    torchair.convert(run, tmp_path / "old", to="fx-old")
    assert {folder.name for folder in (tmp_path / "old" / "data_dump").iterdir()} == {"1", "2"}
    assert len(list((tmp_path / "old" / "data_dump" / "2").glob("gm_*_dump/*.npy"))) == len(
        list(token.iterdir())
    )


def test_a_run_is_written_in_the_files_of_ge_dumps_with_a_graph_that_names_fx_tensors(
    fused, tmp_path: Path
):
    run = fused[2]
    torchair.convert(run, tmp_path / "ge", to="ge")
    (file,) = (tmp_path / "ge").glob(
        "worldsize1_global_rank0/*/0/Model/1/1/AutomaticBufferFusionOp.mul_3.*"
    )
    assert len(file.name.split(".")) == 5
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    message = fields(data[8 : 8 + length])
    assert (message[1], message[6]) == ([b"1.0"], [b"mul_3"])
    (output,) = map(fields, message[3])
    expected = run.tensor("layers.1.norm/Aten.mul.Tensor", step=1, call=1)
    assert (output[1], output[6]) == ([1], [4 * expected.numel()])
    assert fields(output[3][0])[1] == [
        bytes(expected.shape)
    ]  # packed; sizes below 128 are a byte each
    assert fields(output[4][0])[1] == [b"mul_3-aten.mul.Tensor"]
    before = sum(fields(one)[5][0] for one in message[4])
    assert data[8 + length + before :] == expected.numpy().tobytes()
    (graph,) = (tmp_path / "ge").glob("dynamo_original_graph_1_rank_0_pid_0_ts_*.txt")
    assert 's: "mul_3-aten.mul.Tensor.OUTPUT.0"' in graph.read_text(encoding="utf-8")


@pytest.mark.parametrize("to", ["fx", "fx-old", "ge"])
def test_what_was_written_for_torchairs_tools_opens_again_with_all_its_tensors(
    fused, tmp_path: Path, to: str
):
    run = fused[2] if to == "ge" else ld.open_run(fused[3] / "fx")
    written = torchair.convert(run, tmp_path, to=to)
    again = ld.open_run(tmp_path)
    assert len(again) == written.tensors
    assert steps(again) == steps(run) == [0, 1]
    here = [r for r in again.records() if r.site.path.partition("/")[0] in ("rsqrt_1", "mul_3")]
    assert here
    if to != "ge":
        expected = run.tensor("layers.1.norm/Aten.rsqrt", step=1)
        assert torch.equal(again.tensor("rsqrt_1/Aten.rsqrt", step=1), expected)
    report = ld.compare(again, again, progress=False)
    assert report.verdict == "match"


def test_dumps_of_torchair_agree_with_each_other_and_with_the_run_until_a_value_is_changed(
    fused, tmp_path: Path
):
    torchair.convert(fused[3] / "k.fx", tmp_path / "fx")
    torchair.convert(fused[2], tmp_path / "ge", to="ge")
    for golden, mine in (
        (tmp_path / "fx", tmp_path / "ge"),
        (fused[3] / "k.fx", tmp_path / "fx"),
        (tmp_path / "ge", fused[2]),
    ):
        report = ld.compare(golden, mine, progress=False)
        assert report.verdict in AGREED
        coverage = report.coverage
        assert coverage.observables == coverage.observables_matched
        assert coverage.values_matched > 0
    for file in (tmp_path / "ge").glob("worldsize1*/*/*/*/1/1/*"):  # of the last token
        data = file.read_bytes()
        last = torch.frombuffer(bytearray(data[-4:]), dtype=torch.float32) + 3.0
        file.write_bytes(data[:-4] + last.numpy().tobytes())
    report = ld.compare(tmp_path / "fx", tmp_path / "ge", progress=False)
    assert report.verdict == "diverged"
    assert {d.site.step for d in report.differences if d.verdict == "diverged"} == {1}


def test_converting_says_what_was_written_and_why_it_refuses(
    fused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from llmdebug_nb.cli import main

    net = model()
    with torch.no_grad(), ld.dump(net, name="figures", graph="fx", stats_only=True):
        net(example())
    assert main(["convert", "figures", "-o", str(tmp_path / "a")]) == 0
    assert re.search(r"written: 0 tensors, \d+ with statistics alone", capsys.readouterr().out)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "theirs").touch()
    assert main(["convert", str(fused[3] / "fx"), "-o", str(tmp_path / "b")]) == 3
    assert "is not empty: name a new folder" in capsys.readouterr().err
    with torch.no_grad(), ld.dump(net, name="eager"):
        net(example())
    assert main(["convert", "eager", "-o", str(tmp_path / "c")]) == 3
    assert "eager is not of compiled code" in capsys.readouterr().err
    assert main(["convert", "eager", "-o", str(tmp_path / "c"), "--to", "gx"]) == 3
    assert "to 'gx' is not known; known: fx, fx-old, ge" in capsys.readouterr().err
    assert main(["convert", str(fused[3] / "fx"), "-o", str(tmp_path / "d")]) == 0
    assert re.search(r"written: \d+ tensors to ", capsys.readouterr().out)


def test_each_backend_refuses_the_graphs_of_the_other() -> None:
    with pytest.raises(ld.errors.OptionError, match=r"'fused': expected 'fx'; .* inductor_backend"):
        ld.fx_backend(graph="fused")
    with pytest.raises(
        ld.errors.OptionError, match=r"'fx': expected 'fused' .* there is fx_backend"
    ):
        ld.inductor_backend(graph="fx")


@pytest.mark.parametrize("to", ["fx", "fx-old", "ge"])
def test_two_reduced_dumps_match_until_a_program_differs(tmp_path: Path, to: str):
    for name, factor in (("golden", 1.0), ("same", 1.0), ("mine", 1.5)):
        net = model()
        torch._dynamo.reset()
        with torch.no_grad(), ld.dump(net, name=name, graph="fx", stats_only=True) as run:
            net(example() * factor)
        written = torchair.convert(run, tmp_path / name, to=to)
        assert (written.tensors, written.described > 0) == (0, True)
        assert set(written.left_out) <= {"that are no inputs or outputs of operators"}
        assert written.described + sum(written.left_out.values()) == len(run)
    same = ld.compare(tmp_path / "golden", tmp_path / "same", progress=False)
    assert (same.verdict, same.coverage.values) == ("match", same.coverage.values_matched)
    moved = ld.compare(tmp_path / "golden", tmp_path / "mine", progress=False)
    assert moved.verdict == "diverged"
