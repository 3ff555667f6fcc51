"""The user's map: its pairs, the modules that it leaves out, and its error messages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
import reimplemented
from llmdebug_nb.align import names
from llmdebug_nb.cli import main
from models import gpt2, llama, prompt
from recordings import compared, recorded

GOLDEN = [
    "",
    "transformer",
    "transformer.h",
    "transformer.h.0",
    "transformer.h.0.mlp",
    "transformer.h.0.mlp.act",
    "transformer.h.11.mlp",
]
MINE = ["", "model", "layers.0", "layers.0.ffn", "layers.0.ffn.act", "layers.11.ffn", "q", "k"]


def _resolved(mapping, golden=GOLDEN, mine=MINE):
    return {path: paths for path, (paths, _) in names.read(mapping).resolve(golden, mine).items()}


def test_a_star_stands_for_the_same_text_on_both_sides():
    assert _resolved({"transformer.h.*.mlp": "layers.*.ffn"}) == {
        "transformer.h.0.mlp": ("layers.0.ffn",),
        "transformer.h.11.mlp": ("layers.11.ffn",),
        "transformer.h.0.mlp.act": ("layers.0.ffn.act",),  # what is in a module goes with it
    }


def test_the_first_rule_that_fits_counts_and_null_leaves_out():
    mapping = {"*.mlp.act": None, "transformer.h.*.mlp": "layers.*.ffn"}
    assert _resolved(mapping)["transformer.h.0.mlp.act"] == ()
    assert _resolved(mapping)["transformer.h.0.mlp"] == ("layers.0.ffn",)


def test_a_list_maps_several_modules_to_a_fused_one():
    assert _resolved({"transformer.h.0.mlp.act": ["q", "k"]}) == {
        "transformer.h.0.mlp.act": ("q", "k")
    }


@given(
    st.lists(
        st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,3}){0,3}", fullmatch=True), min_size=1, unique=True
    )
)
def test_a_star_for_everything_maps_every_path_to_itself_below_a_prefix(paths):
    mine = [f"w.{path}" for path in paths]
    assert _resolved({"*": "w.*"}, paths, mine) == {path: (f"w.{path}",) for path in paths}


def test_the_map_overrides_all_rules_and_each_pair_names_its_entry(tmp_path):
    model = llama()
    runs = [recorded(model, prompt(), name=name) for name in ("golden", "mine")]
    path = tmp_path / "map.yaml"
    path.write_text(
        "# crossed on purpose\nmodel.layers.0.mlp.up_proj: "
        "model.layers.0.mlp.gate_proj\n'*.act_fn': null\n",
        encoding="utf-8",
    )
    report = ld.compare(*runs, mapping=path)
    crossed = [
        d
        for d in report.differences
        if d.site.path == "model.layers.0.mlp.up_proj" and d.pair.golden
    ]
    assert {d.pair.mine.site.path for d in crossed} == {"model.layers.0.mlp.gate_proj"}
    where = (
        f"user map: {path}, line 2, 'model.layers.0.mlp.up_proj' -> model.layers.0.mlp.gate_proj"
    )
    assert {d.pair.why for d in crossed} == {where}
    left = [d for d in report.differences if d.site.path.endswith("act_fn") and d.pair.golden]
    assert {d.reason for d in left} == {"only in golden: the map leaves it out"}


def test_the_command_line_takes_a_map(tmp_path, capsys):
    theirs = gpt2()
    compared(theirs, reimplemented.GPT(theirs), prompt())
    path = tmp_path / "map.json"
    path.write_text(
        json.dumps(
            {"transformer.h.*.mlp.act": "blocks.*.gelu", "transformer.drop": None}, indent="\t"
        ),
        encoding="utf-8",
    )
    table = tmp_path / "table.csv"
    assert main(["compare", "golden", "mine", "--map", str(path), "-o", str(table)]) == 0
    assert (
        f"user map: {path}, line 2, 'transformer.h.*.mlp.act' -> blocks.*.gelu"
        in table.read_text(encoding="utf-8")
    )
    path.write_text('{\n\t"transformer.x": "blocks"\n}', encoding="utf-8")
    assert main(["compare", "golden", "mine", "--map", str(path)]) == 3
    said = capsys.readouterr().err
    assert (
        f"llmdebug: mapping {path}, line 2, 'transformer.x' -> blocks: golden has no "
        "transformer.x; nearest: transformer" in said
    )


def test_the_map_may_equate_types_as_msits_own_file_does(tmp_path):
    (tmp_path / names.UPSTREAM).write_text(json.dumps({
        "LinearOperation": "Linear", "CommonLayer_outtensor0": ["GLMBlock_output_0",
            "BloomBlock_output_0"],
    }), encoding="utf-8")  # fmt: skip
    read = names.read(tmp_path)
    assert (
        read.kind("LinearOperation") == read.kind("QuantLinear") == read.kind("Linear")
    )  # any part of the name
    assert read.kind("GLMBlock") == read.kind("BloomBlock") != read.kind("Linear")
    assert read.same_output(("GLMBlock", "0"), ("CommonLayer", "0"))
    assert not read.same_output(("GLMBlock", "1"), ("CommonLayer", "0"))
    ours = names.read({"types": {"Conv1D": "Linear"}})
    assert ours.kind("Conv1D") == ours.kind("Linear") != ours.kind("QuantLinear")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: b\nc: 3\n", "line 2, 'c': 3 is not a name"),
        ("a: b\nc: []\n", "line 2, 'c': [] is not a name"),
        ("a: b\nc:\n- d\n- 5\n", "line 2, 'c': 5 is not a name"),
        ("a: b\nb: c\na: d\n", "line 3, 'a': a second time, after line 1"),
        ("a.*: b.*.*\n", "line 1, 'a.*': 'b.*.*' has more * than 'a.*'"),
        ("a: [b\nc: d\n", "line 2: "),
        ("- a\n- b\n", "expected golden's names with mine's"),
        ("", "the file is empty"),
        ("types:\n  Linear!: Conv1D\n", "line 2, 'Linear!': 'Linear!'; expected a type"),
        (
            "transformer.h.*.mlp: layers.*.mlp\n",
            "line 1, 'transformer.h.*.mlp' -> layers.*.mlp: mine has no layers.*.mlp; nearest: ",
        ),
        (
            "transformer.g: model\n",
            "line 1, 'transformer.g' -> model: golden has no transformer.g; nearest: transformer",
        ),
        (
            "layers.0.ffn: transformer.h.0.mlp\n",
            "only mine has layers.0.ffn; golden's name comes first",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(tmp_path, text, problem):
    path = tmp_path / "map.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ld.errors.OptionError) as error:
        _resolved(path)
    message = str(error.value)
    assert str(path) in message
    assert problem in message
    assert "\n" not in message


def test_a_missing_or_invalid_map_is_an_error():
    with pytest.raises(
        ld.errors.OptionError, match=r"mapping 'nowhere.yaml' can't be read: No such file"
    ):
        names.read("nowhere.yaml")
    with pytest.raises(
        ld.errors.OptionError, match="mapping 5: expected a dict, or a YAML or JSON file"
    ):
        names.read(5)
    with pytest.raises(ld.errors.OptionError, match="mapping 'a': 3 is not a name"):
        names.read({"a": 3})


def test_a_map_is_data_and_never_code(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("a: !!python/object/apply:os.system ['touch /tmp/never']\n", encoding="utf-8")
    with pytest.raises(ld.errors.OptionError, match="line 1"):
        names.read(path)
