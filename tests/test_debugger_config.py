"""msprobe's config.json: what each field means, what has no effect, and what is refused."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from debugger_loops import config_file, mlp, train
from llmdebug_nb import msit, msprobe
from llmdebug_nb.app.upstream.precision_debugger_config import read_config

SELECTION = ("scope", "list", "data_mode")
COMMON = (
    *("task", "dump_path", "rank", "step", "level", "dump_enable", "extra_info", "async_dump"),
    *("precision", "risk_level", "enable_dataloader", "custom_op_namespaces", "load"),
)
SECTIONS = {
    "statistics": (*SELECTION, "summary_mode", "tensor_list", "slice", "request_id"),
    "tensor": (
        *(*SELECTION, "summary_mode", "slice", "request_id"),
        *("bench_path", "diff_nums", "file_format"),
    ),
    "overflow_check": (*SELECTION, "overflow_nums", "check_mode"),
}
WITHOUT_EFFECT = [
    (None, "async_dump", (True, False)),
    (None, "precision", ("low", "high")),
    ("tensor", "file_format", ("npy", "bin")),
]
REFUSED = [
    (None, "enable_dataloader", "call start(), stop() and step() in your loop"),
    (None, "custom_op_namespaces", "ld.dump(mode='aten')"),
    (None, "load", "inputs are only recorded, never replaced"),
    ("statistics", "tensor_list", "use task tensor"),
    ("statistics", "request_id", "use slice"),
    ("tensor", "request_id", "use slice"),
    ("tensor", "bench_path", "ld.compare(golden, mine)"),
    ("tensor", "diff_nums", "ld.compare(golden, mine)"),
]
OTHER_TASKS = {
    "structure": "run.nodes",
    "nan_check": "use task overflow_check",
    "exception_dump": "use task overflow_check",
    "acc_check": "ld.compare(golden, mine)",
    "run_ut": "ld.compare(golden, mine)",
    "free_benchmark": "ld.compare(golden, mine)",
    "diff_check": "ld.compare(golden, mine)",
    "grad_probe": "use task statistics with data_mode ['backward']",
}


def _in(section, values):
    """Return a file with these fields in a section, or outside all sections."""
    return values if section is None else {"task": section, section: values}


UPSTREAM_DEFAULT = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "extra_info": True,
    "async_dump": False,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}
OLD_DEFAULT = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "enable_dataloader": False,
    "async_dump": False,
    "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"},
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
    "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
    "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
    "free_benchmark": {
        "scope": [],
        "list": [],
        "fuzz_device": "npu",
        "pert_mode": "improve_precision",
    },
}


@pytest.fixture(autouse=True)
def _no_hook_stays_and_nothing_warns_unless_a_test_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _options(folder, values):
    return read_config(config_file(folder, values)).options


def _refusal(folder, values):
    with pytest.raises(ld.errors.OptionError) as caught:
        read_config(config_file(folder, values))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(folder))
    return message


@pytest.mark.parametrize(
    "values", [UPSTREAM_DEFAULT, OLD_DEFAULT, {}], ids=["26.x", "8.3.3", "empty"]
)
def test_upstreams_own_config_files_are_taken(tmp_path, values):
    config = read_config(config_file(tmp_path, values))
    options = config.options
    assert (options.mode, options.stats_only, str(options.tokens), options.ranks) == (
        ("api",),
        True,
        "0-",
        None,
    )
    assert options.path == values.get("dump_path")
    assert (options.phase, options.part, options.contains, options.scope) == (
        "both",
        "both",
        (),
        (),
    )
    assert not config.saves_only
    assert config.switch.is_on()


def test_without_a_file_the_defaults_are_the_same(tmp_path):
    assert (
        read_config().options == _options(tmp_path, {}) == _options(tmp_path, dict.fromkeys(COMMON))
    )


@pytest.mark.parametrize(
    ("values", "option", "value"),
    [
        ({"task": "statistics"}, "stats_only", True),
        ({"task": "tensor"}, "stats_only", False),
        ({"task": "overflow_check"}, "overflow", 1),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": 5}}, "overflow", 5),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": -1}}, "overflow", 0),
        ({"task": "overflow_check", "overflow_check": {"check_mode": "all"}}, "stats_only", False),
        ({"task": "statistics", "overflow_check": {"overflow_nums": 5}}, "overflow", None),
        ({"dump_path": "some/where"}, "path", "some/where"),
        ({"rank": [0, "4-6"]}, "ranks", "0,4-6"),
        ({"rank": []}, "ranks", "None"),
        ({"step": [7, "4-6", 0]}, "tokens", "0,4-6,7"),
        ({"step": 3}, "tokens", "3"),
        ({"step": "2-3"}, "tokens", "2-3"),
        ({"step": []}, "tokens", "0-"),
        ({"level": "L0"}, "mode", ("module",)),
        ({"level": "L1"}, "mode", ("api",)),
        ({"level": "mix"}, "mode", ("module", "api")),
        ({"extra_info": True}, "sources", True),
        ({"extra_info": False}, "sources", False),
        ({"risk_level": "ALL"}, "mode", ("api",)),
        ({"statistics": {"summary_mode": "statistics"}}, "fingerprint", "xxh3"),
        ({"statistics": {"summary_mode": "md5"}}, "fingerprint", "crc32"),
        ({"statistics": {"summary_mode": "xor"}}, "fingerprint", "xor"),
        ({"task": "tensor", "tensor": {"summary_mode": "statistics"}}, "fingerprint", "xxh3"),
        ({"statistics": {"list": ["relu", "fc1"]}}, "contains", ("relu", "fc1")),
        ({"task": "tensor", "tensor": {"list": ["relu"]}}, "contains", ("relu",)),
        ({"task": "overflow_check", "overflow_check": {"list": ["relu"]}}, "contains", ("relu",)),
        ({"task": "statistics", "tensor": {"list": ["relu"]}}, "contains", ()),
        (
            {"statistics": {"scope": ["Torch.a.0.forward", "Torch.b.1.backward"]}},
            "scope",
            ("Torch.a.0.forward", "Torch.b.1.backward"),
        ),
        (
            {
                "level": "mix",
                "statistics": {"scope": ["Module.a.Linear.forward.0", "Torch.b.1.forward"]},
            },
            "scope",
            ("Module.a.Linear.forward.0", "Torch.b.1.forward"),
        ),
        ({"statistics": {"data_mode": ["all"]}}, "phase", "both"),
        ({"statistics": {"data_mode": ["forward"]}}, "phase", "forward"),
        ({"statistics": {"data_mode": ["forward"]}}, "part", "both"),
        ({"statistics": {"data_mode": ["backward", "input"]}}, "phase", "backward"),
        ({"statistics": {"data_mode": ["backward", "input"]}}, "part", "input"),
        ({"statistics": {"data_mode": ["output"]}}, "phase", "both"),
        ({"statistics": {"data_mode": ["forward", "backward"]}}, "phase", "both"),
        ({"statistics": {"data_mode": ["input", "output", "forward"]}}, "part", "both"),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 1, "begin": 0, "end": 4}]}},
            "slice",
            ":,0:4",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"begin": 2}, {"dim": 2, "end": -1}]}},
            "slice",
            "2:,:,0:-1",
        ),
        ({"task": "tensor", "tensor": {"slice": []}}, "slice", None),
    ],
)
def test_each_field_becomes_its_option(tmp_path, values, option, value):
    found = getattr(_options(tmp_path, values), option)
    assert (str(found) if option in ("tokens", "ranks") else found) == value


def test_level_debug_records_saves_only(tmp_path):
    assert read_config(config_file(tmp_path, {"level": "debug"})).saves_only


def test_the_list_of_operators_is_the_users_to_edit_also_as_msprobe_keeps_it(tmp_path):
    listed = tmp_path / "support_wrap_ops.yaml"
    listed.write_text("functional:\n  - linear\ntensor:\n  - add\n  - __mul__\n_VF: []\n")
    expected = ("Functional.linear", "Tensor.add", "Tensor.__mul__")
    assert _options(tmp_path, {"apis": str(listed)}).apis == expected
    assert msprobe.PrecisionDebugger(apis=listed).options.apis == expected
    assert msprobe.PrecisionDebugger(apis=["linear"]).options.apis == ("linear",)
    assert _options(tmp_path, {"apis": ["relu"], "level": "mix"}).apis == ("relu",)
    with pytest.raises(ld.errors.OptionError, match="apis: level L0 records no operators"):
        read_config(level="L0", apis=["linear"])
    listed.write_text("torch: [add]\ntorch_npu: [npu_rope, npu_swiglu]\n")
    with pytest.warns(UserWarning, match=r"do not run at this level: torch_npu \(2\)"):
        assert read_config(apis=listed).options.apis == ("Torch.add",)


def test_arguments_go_before_the_file(tmp_path):
    path = config_file(
        tmp_path, {"task": "statistics", "level": "mix", "dump_path": "there", "step": [1]}
    )
    options = msprobe.PrecisionDebugger(str(path), "tensor", "here", "L0", None, [2]).options
    assert (options.stats_only, options.mode, options.path, str(options.tokens)) == (
        False,
        ("module",),
        "here",
        "2",
    )
    assert options.name == "debugger"


def test_a_file_configures_a_whole_recording(tmp_path):
    values = {
        "task": "tensor",
        "level": "L0",
        "step": [1],
        "dump_path": str(tmp_path / "out"),
        "tensor": {"data_mode": ["forward", "output"]},
    }
    model, debugger = mlp(), msprobe.PrecisionDebugger(config_file(tmp_path, values))
    train(debugger, model, 3)
    frame = ld.open_run(tmp_path / "out").to_pandas()
    assert (set(frame.step), set(frame.role), set(frame.phase)) == ({1}, {"output"}, {"forward"})


def test_list_and_scope_select_calls(tmp_path):
    model = mlp()
    listed = msprobe.PrecisionDebugger(
        config_file(tmp_path, {"task": "tensor", "level": "L0", "tensor": {"list": ["ReLU"]}})
    )
    train(listed, model, 1)
    assert set(listed.close().to_pandas().path) == {"1"}
    scope = ["Module.1.ReLU.forward.0", "Module.2.Linear.forward.0"]
    scoped = msprobe.PrecisionDebugger(
        config_file(tmp_path, {"task": "tensor", "level": "L0", "tensor": {"scope": scope}})
    )
    train(scoped, model, 1)
    frame = scoped.close().to_pandas()
    assert set(frame[frame.phase == "forward"].path) == {"1", "2"}


# -- config.json: what has no effect, and what is refused -----------------------------------------


@pytest.mark.parametrize(("section", "name", "known"), WITHOUT_EFFECT)
def test_fields_without_effect_are_taken_and_checked(tmp_path, section, name, known):
    for value in (*known, None):
        assert _options(tmp_path, _in(section, {name: value}))
    refused = _refusal(tmp_path, _in(section, {name: "odd"}))
    assert f"{name} 'odd': expected" in refused


@pytest.mark.parametrize(("section", "name", "instead"), REFUSED)
def test_fields_that_are_not_supported_are_refused_with_what_to_do(
    tmp_path, section, name, instead
):
    for empty in (None, []):
        assert _options(tmp_path, _in(section, {name: empty}))
    reason = _refusal(tmp_path, _in(section, {name: ["x"]})).partition(
        f"{name} is not supported: "
    )[2]
    assert instead in reason


@pytest.mark.parametrize("task", OTHER_TASKS)
def test_tasks_that_are_not_supported_are_refused_with_what_to_do(tmp_path, task):
    assert OTHER_TASKS[task] in _refusal(tmp_path, {"task": task})
    with pytest.raises(ld.errors.OptionError, match=f"^task '{task}' is not supported"):
        msprobe.PrecisionDebugger(task=task)
    assert _options(tmp_path, {task: {"anything": 1}})  # a section of a task that was not chosen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # unknown
        ({"taks": "tensor"}, "taks: no such field; nearest: task"),
        ({"statistics": {"lits": []}}, "statistics.lits: no such field; nearest: list"),
        ({"task": "tensor", "tensor": {"overflow_nums": 1}}, "tensor.overflow_nums: no such field"),
        ({"task": "tensr"}, "task 'tensr' is not known; nearest: tensor"),
        ({"level": "L3"}, "level 'L3' is not known; nearest: L1"),
        ({"level": "l1"}, "level 'l1' is not known"),
        (
            {"statistics": {"summary_mode": "sha"}},
            "statistics.summary_mode 'sha' is not known; nearest: ",
        ),
        (
            {"statistics": {"data_mode": ["forwards"]}},
            "statistics.data_mode 'forwards' is not known; nearest: forward",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dims": 1}]}},
            "tensor.slice.dims: no such field; nearest: dim",
        ),
        # not supported
        (
            {"level": "L2"},
            "level 'L2' is not supported: kernels of the device are not seen; use level L1",
        ),
        ({"risk_level": "CORE"}, "risk_level 'CORE' is not supported"),
        ({"risk_level": "FOCUS"}, "risk_level 'FOCUS' is not supported"),
        (
            {"statistics": {"list": ["name-regex(a.*)"]}},
            "statistics.list: name-regex(…) is not supported",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"check_mode": "aicore"}},
            "check_mode 'aicore' is not supported: use all",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 0, "size": 8, "end": 2}]}},
            "tensor.slice.size is not supported",
        ),
        # wrong types
        ({"task": 3}, "task 3: expected one of"),
        ({"level": ["L1"]}, "level ['L1']: expected one of L0, L1, mix, debug"),
        ({"dump_path": 3}, "dump_path 3: expected a path"),
        ({"dump_path": ""}, "dump_path '': expected a path"),
        ({"dump_path": "a\0b"}, "expected a path"),
        ({"dump_path": "a\ud800b"}, "expected a path"),
        ({"rank": "all"}, "rank 'all': expected a list of numbers and ranges"),
        ({"rank": [-1]}, "rank [-1]: expected a list of numbers and ranges"),
        ({"step": [1.5]}, "step [1.5]: expected a list"),
        ({"step": [True]}, "step [True]: expected a list"),
        ({"step": ["a-b"]}, "step ['a-b']: expected a list"),
        ({"step": ["4-"]}, "step ['4-']: expected a list"),
        ({"step": {"from": 1}}, "expected a list"),
        ({"step": ["6-4"]}, "runs backwards; write 4-6"),
        ({"dump_enable": "yes"}, "dump_enable 'yes': expected true or false"),
        ({"extra_info": 1}, "extra_info 1: expected true or false"),
        ({"statistics": []}, "statistics []: expected an object"),
        ({"grad_probe": 3}, "grad_probe 3: expected an object"),
        ({"statistics": {"scope": "x"}}, "statistics.scope 'x': expected a list of texts"),
        ({"statistics": {"list": [1]}}, "statistics.list [1]: expected a list of texts"),
        ({"statistics": {"list": [""]}}, "statistics.list ['']: expected a list of texts"),
        (
            {"statistics": {"data_mode": "all"}},
            "statistics.data_mode 'all': expected a list of texts",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"overflow_nums": 0}},
            "overflow_nums 0: expected how many calls",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"overflow_nums": True}},
            "overflow_nums True: expected how many calls",
        ),
        (
            {"task": "overflow_check", "overflow_check": {"overflow_nums": "1"}},
            "overflow_nums '1': expected how many calls",
        ),
        (
            {"task": "tensor", "tensor": {"slice": {"dim": 0}}},
            "tensor.slice {'dim': 0}: expected a list",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": -1}]}},
            "tensor.slice.dim -1: expected a dimension",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 10**8}]}},
            "expected a dimension from 0 to 63",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"begin": "0"}]}},
            "tensor.slice.begin '0': expected a whole number",
        ),
        # contradictions
        ({"statistics": {"data_mode": ["all", "input"]}}, "all can't be combined with others"),
        ({"statistics": {"scope": ["Torch.a.0.forward"]}}, "expected two full names"),
        (
            {"statistics": {"scope": ["Module.a.Linear.forward.0"] * 2}},
            "level L1 records operators",
        ),
        (
            {"level": "L0", "statistics": {"scope": ["Torch.a.0.forward"] * 2}},
            "level L0 records modules",
        ),
        (
            {"task": "tensor", "tensor": {"summary_mode": "md5"}},
            "summary_mode 'md5' (which is CRC-32 of the bytes) goes with task statistics, not "
            "with task tensor",
        ),
        (
            {"statistics": {"slice": [{"dim": 0, "end": 1}]}},
            "slice goes with task tensor, not with task statistics",
        ),
        (
            {"task": "overflow_check", "level": "debug"},
            "task overflow_check and level debug exclude each other",
        ),
        (
            {"level": "debug", "statistics": {"scope": ["a", "b"]}},
            "statistics.scope and level debug exclude each other",
        ),
        (
            {"level": "debug", "statistics": {"list": ["a"]}},
            "statistics.list and level debug exclude each other",
        ),
        (
            {"level": "debug", "statistics": {"data_mode": ["input"]}},
            "statistics.data_mode and level debug exclude each other",
        ),
        (
            {"task": "tensor", "tensor": {"slice": [{"dim": 0, "begin": 2, "end": 2}]}},
            "from 2 to 2 there is nothing",
        ),
        ({"task": "tensor", "tensor": {"slice": [{"dim": 0}, {"dim": 0}]}}, "each one once"),
    ],
)
def test_what_makes_no_sense_in_a_file_is_named(tmp_path, values, message):
    assert message in _refusal(tmp_path, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"task": "tensor",}', "expected a JSON object"),
        ("[]", "it holds a list"),
        ("3", "it holds a int"),
        ('{"task": "tensor", "task": "statistics"}', "'task' is there twice"),
        ('{"tensor": {"list": [], "list": ["a"]}}', "'list' is there twice"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"step": [' + "9" * 5000 + "]}", "expected a"),
        ('{"a\\nb": 1}', "no such field"),
        ('{"\\ud800": 1}', "no such field"),
        ('{"' + "x" * 10_000 + '": 1}', "no such field"),
        ('{"level": "' + "x" * 10_000 + '"}', "is not known"),
        (" " * (1 << 21), "larger than 1 MiB"),
    ],
    ids=range(14),
)
def test_hostile_files_are_refused_in_one_readable_line(tmp_path, text, message):
    said = _refusal(tmp_path, text)
    assert message in said
    said.encode()


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["tensor", "debug", "1-2", "all"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dim", "begin", "end", "x"]) | st.text(), inner)
    ),
    max_leaves=8,
)
_FIELDS = sorted({*COMMON, *SECTIONS})
_IN_SECTIONS = sorted({name for section in SECTIONS.values() for name in section})


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_FIELDS),
        _JSON | st.dictionaries(st.sampled_from(_IN_SECTIONS), _JSON),
        max_size=3,
    ),
    st.sampled_from([None, "statistics", "tensor", "overflow_check"]),
)
def test_whatever_a_file_says_is_taken_or_refused_in_one_line(tmp_path_factory, values, task):
    path = config_file(tmp_path_factory.getbasetemp(), values, "fuzzed.json")
    try:
        read_config(path, task=task)
    except ld.errors.OptionError as error:
        said = str(error)
        assert said.isprintable(), said


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ld.errors.OptionError, match=r"nowhere\.json: there is no such file"):
        read_config(tmp_path / "nowhere.json")
    with pytest.raises(ld.errors.OptionError, match="there is no such file"):
        read_config(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ld.errors.OptionError, match=r"binary\.json"):
        read_config(tmp_path / "binary.json")
    for odd in (3, ["config.json"], b"config.json"):
        with pytest.raises(ld.errors.OptionError, match="config_path"):
            msprobe.PrecisionDebugger(odd)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ld.errors.OptionError, match="there is no such file"):
        read_config(tmp_path / "pipe.json")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"level": "L0"}).encode())
    assert read_config(path).options.mode == ("module",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "tensr"}, "^task 'tensr' is not known; nearest: tensor"),
        ({"task": 3}, "^task 3"),
        ({"level": "L2"}, "^level 'L2' is not supported"),
        ({"level": "L9"}, "^level 'L9' is not known"),
        ({"step": "x"}, "^step 'x'"),
        ({"step": [-1]}, r"^step \[-1\]"),
        ({"dump_path": 3}, "path 3"),
        ({"name": "../x"}, "name '../x'"),
        ({"task": "overflow_check", "level": "debug"}, "exclude each other"),
    ],
)
def test_arguments_that_make_no_sense_are_named(given, message):
    with pytest.raises(ld.errors.OptionError, match=message):
        msprobe.PrecisionDebugger(**given)


def test_every_field_and_every_parameter_has_its_place_in_the_documentation():
    text = (Path(__file__).parent.parent / "docs" / "precision_debugger.md").read_text(
        encoding="utf-8"
    )
    parameters = inspect.signature(msit.DumpConfig).parameters.keys() - {"name"}
    fields = {*COMMON, *SECTIONS, *OTHER_TASKS, *_IN_SECTIONS}
    assert [name for name in sorted(fields | parameters) if f"`{name}`" not in text] == []
