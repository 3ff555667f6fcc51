"""msit's DumpConfig and register_hook: every parameter."""

from __future__ import annotations

import contextlib
import csv
import re
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.nn import functional

import llmdebug_nb as ld
from llmdebug_nb import msit
from llmdebug_nb.app.upstream import register_hook
from llmdebug_nb.app.upstream.dump_config import globs_of
from llmdebug_nb.core.options import runs_folder
from models import generate, hooks_left, llama, prompt


def _options(**given):
    return msit.DumpConfig(**given).options


# -- what each parameter means --------------------------------------------------------------------


def test_as_it_is_the_first_token_of_all_modules_is_recorded_here():
    options = _options()
    assert options.path == "./"
    assert str(options.tokens) == "0"
    assert (options.mode, options.phase, options.part) == (("module",), "forward", "both")
    assert (options.stats_only, options.weights, options.logits) == (False, False, False)
    assert (options.layers, options.types, options.apis) == ((), (), ())


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"token_range": [0, 2]}, "tokens", "0,2"),
        ({"token_range": []}, "tokens", "0"),
        ({"token_range": range(3)}, "tokens", "0,1,2"),
        ({"module_list": [nn.Linear]}, "types", (nn.Linear,)),
        ({"module_list": []}, "types", ()),
        ({"api_list": [functional.linear, torch.add, "soft*"]}, "apis", ("linear", "add", "soft*")),
        ({"tensor_part": 0}, "part", "in"),
        ({"tensor_part": 1}, "part", "out"),
        ({"tensor_part": 2}, "part", "both"),
        ({"dump_statistics_mode": 0}, "stats_only", False),
        ({"dump_statistics_mode": 1}, "stats_only", True),
        ({"dump_statistics_mode": 2}, "stats_only", False),
        ({"dump_last_logits": True}, "logits", True),
        ({"dump_weight": True}, "weights", True),
        ({"mode": "module"}, "mode", ("module",)),
        ({"mode": "api"}, "mode", ("api",)),
        ({"mode": ["module", "api"]}, "mode", ("module", "api")),
        ({"mode": []}, "mode", ("module",)),
        ({"layer_name": "root.model.norm"}, "layers", ("model.norm",)),
        ({"seed": 5}, "seed", 5),
    ],
)
def test_each_parameter_becomes_its_option(given, option, value):
    found = getattr(_options(**given), option)
    assert (str(found) if option == "tokens" else found) == value


def test_operators_may_be_listed_in_a_file(tmp_path):
    listed = tmp_path / "apis.yaml"
    listed.write_text("include: [linear, 'soft*']\nexclude: [softplus]\n", encoding="utf-8")
    assert _options(api_list=listed).apis == ("linear", "soft*", "!softplus")


def test_the_older_positions_of_the_arguments_are_understood(tmp_path):
    options = msit.DumpConfig(tmp_path, [0], [nn.Linear], 1).options
    assert (options.types, options.part) == ((nn.Linear,), "out")
    assert msit.DumpConfig(tmp_path, [0], [nn.Linear]).options.part == "both"
    with pytest.raises(ld.errors.OptionError, match="the fourth is the tensor_part"):
        msit.DumpConfig(tmp_path, [0], [nn.Linear], [nn.ReLU])


@pytest.mark.parametrize("value", [2345, "yes", 1, 0, None])
def test_only_true_writes_the_analysis_and_any_value_is_taken(tmp_path, value):
    """msit 8.2, torch_dump/dump_hook.py: ``if dump_config.analyze is True``."""
    says = pytest.warns(UserWarning, match=f"analyze {value!r}: tensor_analyze.csv")
    with says if value else contextlib.nullcontext():
        config = msit.DumpConfig(tmp_path, [0, 1], value)
    assert str(config.options.tokens) == "0,1"
    model = nn.Linear(2, 2)
    hook = msit.register_hook(model, config)
    model(torch.ones(1, 2))
    assert not (hook.stop().path / "tensor_analyze.csv").exists()


def test_the_hook_type_of_msit_is_taken_and_no_other(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        hook = msit.register_hook(model, msit.DumpConfig(tmp_path), hook_type="dump_data")
        model(torch.ones(1, 2))
        assert len(hook.stop()) == 2
    with pytest.raises(ld.errors.OptionError, match="hook_type 'overflow' is not known"):
        msit.register_hook(model, hook_type="overflow")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dump_path": 3}, "dump_path 3"),
        ({"token_range": 3}, "token_range 3: expected a list"),
        ({"token_range": "0"}, "token_range '0': expected a list"),
        ({"token_range": [-1]}, r"token_range \[-1\]: '-1' is neither"),
        ({"token_range": ["x"]}, r"token_range \['x'\]: 'x' is neither"),
        ({"module_list": [3]}, "module_list"),
        ({"api_list": 3}, "api_list 3"),
        ({"tensor_part": 3}, "tensor_part 3"),
        ({"tensor_part": "2"}, "tensor_part '2'"),
        ({"device_id": "0"}, "device_id '0'"),
        ({"dump_statistics_mode": 5}, "dump_statistics_mode 5"),
        ({"dump_last_logits": 1}, "dump_last_logits 1"),
        ({"mode": "apis"}, "mode 'apis'.*module, api"),
        ({"mode": 3}, "mode 3"),
        ({"dump_weight": None}, "dump_weight None"),
        ({"layer_name": ["a"]}, "layer_name"),
        ({"layer_name": ""}, "layer_name ''"),
        ({"layer_name": "root"}, "module_list"),
        ({"seed": -1}, "seed -1"),
        ({"seed": "x"}, "seed 'x'"),
    ],
)
def test_an_invalid_argument_is_named_as_the_user_wrote_it(given, message):
    with pytest.raises(ld.errors.OptionError, match=message) as caught:
        msit.DumpConfig(**given)
    assert "\n" not in str(caught.value)


def test_two_configs_are_two_configs():
    first, second = msit.DumpConfig(token_range=[0]), msit.DumpConfig(token_range=[1])
    assert first is not second
    assert [str(c.options.tokens) for c in (first, second)] == ["0", "1"]


# -- layer_name -----------------------------------------------------------------------------------

PATHS = [
    "",
    "lm_head",
    "model",
    "model.norm",
    "model.layers.0",
    "model.layers.0.mlp",
    "layers.0.norm",
    "root",
    "a?b[c]",
]
PATTERNS = [
    "*",
    "root*",
    "root.*",
    "*norm",
    "*.norm",
    "root.model.layers.*",
    "root.a?b[c]",
    "r*.norm",
    "*.*.norm",
    "**mlp",
    "root.lm_head",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layer_name_matches_as_in_msit(pattern):
    globs = globs_of(pattern)
    theirs = re.compile("".join(".*" if c == "*" else re.escape(c) for c in pattern))
    for path in PATHS:
        name = f"root.{path}" if path else "root"
        assert any(fnmatchcase(path, glob) for glob in globs) == bool(theirs.fullmatch(name)), path


def test_layer_name_may_be_a_path_as_a_run_shows_it():
    assert globs_of("model.layers.0.*") == ["model.layers.0.*"]
    assert globs_of("lm_head") == ["lm_head"]


def test_many_stars_are_one():
    assert globs_of("*" * 100_000 + "mlp") == ["*mlp"]


def test_layer_name_selects_modules():
    model = llama()
    for name in ("root.model.layers.1.mlp*", "model.layers.1.mlp*"):
        hook = msit.register_hook(model, msit.DumpConfig(dump_path=runs_folder(), layer_name=name))
        model(prompt())
        paths = set(hook.stop().to_pandas().path)
        assert paths
        assert all(path.startswith("model.layers.1.mlp") for path in paths)


# -- recording ------------------------------------------------------------------------------------


def test_tokens_parts_types_and_statistics(tmp_path):
    model = llama()
    config = msit.DumpConfig(
        tmp_path,
        token_range=[0, 2],
        module_list=[nn.Linear],
        tensor_part=1,
        layer_name="*mlp*",
        dump_statistics_mode=1,
    )
    hook = msit.register_hook(model, config)
    generate(model, new=4)
    run = hook.stop()
    frame = run.to_pandas()
    assert set(frame.step) == {0, 2}
    assert set(frame.role) == {"output"}
    assert set(frame.op) == {"Linear"}
    assert frame.l2norm.notna().all()
    assert run.info()["payloads"] == 0
    assert ld.open_run(tmp_path).path == run.path
    assert hooks_left(model) == 0


def test_statistics_are_there_in_every_mode(tmp_path):
    model = llama()
    for mode in (0, 1, 2):
        hook = msit.register_hook(
            model, msit.DumpConfig(tmp_path, dump_statistics_mode=mode, layer_name="*norm")
        )
        model(prompt())
        assert hook.stop().to_pandas().l2norm.notna().all()


def test_tokens_that_never_came_are_reported(tmp_path):
    model = llama()
    hook = msit.register_hook(model, msit.DumpConfig(tmp_path, token_range=[7]))
    generate(model, new=2)
    with pytest.raises(ld.errors.EmptyDumpError, match="7 never came; steps seen: 0-1"):
        hook.stop()


def test_operators_of_the_model_are_recorded(tmp_path):
    model = llama()
    hook = msit.register_hook(
        model, msit.DumpConfig(tmp_path, mode=["module", "api"], api_list=[functional.linear])
    )
    model(prompt())
    paths = set(hook.stop().to_pandas().path)
    assert any("linear" in path and "/" in path for path in paths)
    assert "lm_head" in paths


def test_weights_are_recorded(tmp_path):
    model = llama()
    hook = msit.register_hook(
        model, msit.DumpConfig(tmp_path, dump_weight=True, layer_name="root.lm_head")
    )
    model(prompt())
    run = hook.stop()
    assert torch.equal(run.tensor("lm_head", role="weight"), model.lm_head.weight)


def test_only_the_last_logits_are_recorded(tmp_path):
    model = llama()
    hook = msit.register_hook(
        model, msit.DumpConfig(tmp_path, dump_last_logits=True, token_range=[0, 1])
    )
    generate(model, new=2)
    frame = hook.stop().to_pandas()
    assert set(zip(frame.path, frame.step, frame.role, strict=True)) == {
        ("lm_head", 0, "output"),
        ("lm_head", 1, "output"),
    }


def test_a_forward_pass_in_training_gives_forward_records_only(tmp_path):
    model = llama().train()
    hook = msit.register_hook(model, msit.DumpConfig(tmp_path))
    model(input_ids=prompt(), labels=prompt()).loss.backward()
    assert set(hook.stop().to_pandas().phase) == {"forward"}


def test_an_aliased_module_list_and_no_config_at_all_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = llama()
    hook = msit.register_hook(model)
    model(prompt())
    assert hook.remove().path == tmp_path / "msit_dump"


@pytest.mark.parametrize(
    ("model", "config"), [(None, None), (3, None), ([], None), ("model", {"token_range": [0]})]
)
def test_register_hook_refuses_other_objects_than_a_model_and_a_config(model, config):
    model = llama() if model == "model" else model
    with pytest.raises(ld.errors.OptionError, match="expected a"):
        msit.register_hook(model, config)


# -- device_id ------------------------------------------------------------------------------------


def test_a_process_on_another_device_records_nothing_and_says_so(tmp_path, monkeypatch):
    model = llama()
    monkeypatch.setattr(register_hook, "_device_index", lambda model: 1)
    with pytest.warns(
        UserWarning, match="device_id=0: this process runs on device 1 and records nothing"
    ):
        hook = msit.register_hook(
            model, msit.DumpConfig(tmp_path, device_id=0, analyze=True, seed=3)
        )
    model(prompt())
    with pytest.warns(UserWarning, match="nothing to stop: device_id=0"):
        assert hook.stop() is None
    with pytest.warns(UserWarning, match="nothing to stop"):
        assert hook.remove() is None
    assert list(tmp_path.iterdir()) == []
    assert hooks_left(model) == 0


def test_the_device_asked_for_and_the_cpu_record(tmp_path, monkeypatch):
    model = llama()
    for index in (None, 0):
        monkeypatch.setattr(register_hook, "_device_index", lambda model, index=index: index)
        hook = msit.register_hook(model, msit.DumpConfig(tmp_path, device_id=0))
        model(prompt())
        assert len(hook.stop()) > 0


# -- analyze --------------------------------------------------------------------------------------


def _analysis(run):
    with open(run.path / "tensor_analyze.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_analyze_leaves_a_table_of_all_tensors_in_the_run(tmp_path):
    model = llama()
    hook = msit.register_hook(model, msit.DumpConfig(tmp_path, analyze=True, token_range=[0, 1]))
    generate(model, new=2)
    run = hook.stop()
    rows = _analysis(run)
    assert list(rows[0]) == [
        "Node Name",
        "Node Type",
        "Tensor Path",
        "dtype",
        "shape",
        "max",
        "min",
        "variance",
        "mean",
    ]
    assert len(rows) == len(run)
    assert {row["Node Name"] for row in rows} >= {"root", "root.lm_head", "root.model.layers.0.mlp"}
    row = next(
        row for row in rows if row["Node Name"] == "root.lm_head" and "output" in row["Tensor Path"]
    )
    assert (row["Node Type"], row["dtype"]) == ("Linear", "torch.float32")
    tensor = eval(row["Tensor Path"], {"ld": ld})
    assert row["shape"] == str(tensor.shape)
    for name in ("max", "min", "mean", "var"):
        found = float(row["variance" if name == "var" else name])
        assert found == pytest.approx(getattr(tensor, name)().item(), rel=1e-4, abs=1e-6)


def test_every_tensor_path_reads_its_tensor_back(tmp_path):
    model = llama()
    hook = msit.register_hook(model, msit.DumpConfig(tmp_path, analyze=True, layer_name="*mlp*"))
    model(prompt())
    for row in _analysis(hook.stop()):
        assert str(eval(row["Tensor Path"], {"ld": ld}).shape) == row["shape"]


class Awkward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, *values):
        return [self.layer(value) for value in values]


def test_figures_that_do_not_exist_are_empty_and_none_stops_the_table(tmp_path):
    model = Awkward()
    hook = msit.register_hook(
        model, msit.DumpConfig(tmp_path, analyze=True, module_list=[nn.Identity], tensor_part=1)
    )
    model(
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.full((4,), 3e38).double() ** 4,
        torch.tensor([1.0, float("nan")]),
    )
    rows = _analysis(hook.stop())
    assert [row["shape"] for row in rows] == [
        "torch.Size([])",
        "torch.Size([0, 3])",
        "torch.Size([4])",
        "torch.Size([2])",
    ]
    assert [row["mean"] for row in rows][:2] == ["2.0", ""]
    assert [row["variance"] for row in rows][:2] == ["", ""]
    assert rows[3]["variance"] == "nan"


def test_a_constant_has_no_variance(tmp_path):
    model = Awkward()
    hook = msit.register_hook(
        model, msit.DumpConfig(tmp_path, analyze=True, module_list=[nn.Identity], tensor_part=1)
    )
    model(torch.full((1000,), 0.1))
    assert 0 <= float(_analysis(hook.stop())[0]["variance"]) < 1e-12


def test_with_statistics_only_the_table_has_no_paths(tmp_path):
    model = llama()
    hook = msit.register_hook(
        model, msit.DumpConfig(tmp_path, analyze=True, dump_statistics_mode=1)
    )
    model(prompt())
    rows = _analysis(hook.stop())
    assert rows
    assert {row["Tensor Path"] for row in rows} == {""}


def test_the_table_does_not_disturb_reading_and_is_absent_when_not_asked_for(tmp_path):
    model = llama()
    hook = msit.register_hook(model, msit.DumpConfig(tmp_path, analyze=True))
    model(prompt())
    with_table = hook.stop()
    assert ld.open_run(with_table.path).info()["complete"]
    hook = msit.register_hook(model, msit.DumpConfig(tmp_path))
    model(prompt())
    assert not (hook.stop().path / "tensor_analyze.csv").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_name": "root.nope"}, "layer_name 'nope' matches none of the"),
        ({"module_list": [nn.Conv2d]}, "module_list 'Conv2d' matches none of the module types"),
        ({"layer_name": "*mlp*", "module_list": [nn.Conv2d]}, "under layer_name *mlp*"),
        ({"mode": "api", "api_list": "nope"}, "api_list: no operator of level api is called"),
        ({"token_range": [7]}, "token_range 7 never came"),
    ],
)
def test_an_empty_recording_names_the_parameter_that_the_user_wrote(tmp_path, config, message):
    model = llama()

    def record():
        hook = msit.register_hook(model, msit.DumpConfig(tmp_path, **config))
        model(prompt())
        hook.stop()

    with pytest.raises(ld.errors.EmptyDumpError) as caught:
        record()
    assert message in str(caught.value)
    assert not hooks_left(model)
