"""Execution ids: every call has one, in execution order, whatever is recorded of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import llmdebug_nb as ld
from llmdebug_nb.core.errors import EmptyDumpError
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.tables import EVERYTHING
from models import ARCHITECTURES, generate, hooks_left, llama, mixtral, prompt
from recordings import change_index


def counted(model: nn.Module, run: Any) -> dict[tuple[str, int], str]:
    """Count the calls of the last forward call of the model by plain hooks of its own."""
    open_: list[str] = []
    below: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    found: dict[tuple[str, int], str] = {}
    handles = []
    for path, module in model.named_modules():

        def begins(module: Any, args: Any, path: str = path) -> None:
            if not path:
                below.clear()
                calls.clear()
                found.clear()
            above = open_[-1] if open_ else None
            own = "" if above is None else f"{above}_{below[above]}".lstrip("_")
            if above is not None:
                below[above] += 1
            found[path, calls[path]] = own
            calls[path] += 1
            open_.append(own)

        handles.append(module.register_forward_pre_hook(begins))
        handles.append(
            module.register_forward_hook(
                lambda *_: setattr(model, "_last", open_.pop()), always_call=True
            )
        )
    run()
    for handle in handles:
        handle.remove()
    return dict(found)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ids_are_those_that_plain_hooks_count_and_the_same_in_each_token(
    name: str, tmp_path: Path
) -> None:
    model = ARCHITECTURES[name]()
    with ld.dump(model, path=tmp_path, tokens="all", stats_only=True) as run:
        generate(model, new=3)
    expected = counted(model, lambda: generate(model, new=3))
    assert run.ids(0) == run.ids(1) == run.ids(2) == expected
    assert list(run.ids()) == list(expected)  # in execution order


@pytest.mark.parametrize(
    "options",
    [
        {"layers": "model.layers.1.mlp*"},
        {"types": "Linear"},
        {"mode": "aten"},
        {"mode": "module+api", "apis": "softmax,add"},
        {"contains": "q_proj"},
        {"logits": True},
        {"part": "out", "phase": "forward"},
        {"ids": "0_2_0"},
    ],
    ids=lambda options: ",".join(options),
)
def test_ids_of_modules_do_not_depend_on_filters_or_mode(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = llama()
    with ld.dump(model, path=tmp_path, stats_only=True) as whole:
        generate(model, new=2)
    with ld.dump(model, path=tmp_path, stats_only=True, **options) as run:
        generate(model, new=2)
    found = {key: value for key, value in run.ids(1).items() if "/" not in key[0]}
    assert found.items() <= whole.ids(1).items()
    assert {r.site.path.partition("/")[0] for r in run.records() if r.site.role != "weight"} <= {
        path for path, _ in found
    }


@pytest.mark.parametrize("level", ["api", "aten"])
def test_ids_of_operators_do_not_depend_on_which_are_asked_for(level: str, tmp_path: Path) -> None:
    model = mixtral()
    with ld.dump(model, path=tmp_path, mode=level, stats_only=True) as whole:
        model(prompt())
    every = whole.ids()
    with ld.dump(model, path=tmp_path, mode=level, apis="mul,!softmax", stats_only=True) as run:
        model(prompt())
    some = {key: value for key, value in run.ids().items() if "/" in key[0]}
    assert some
    assert all("mul" in path for path, _ in some)
    assert all(every[key] == value for key, value in some.items())


def test_operators_count_within_the_call_around_them(tmp_path: Path) -> None:
    class Counter_(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    layer = llama().model.layers[0].mlp
    x = torch.randn(1, 3, 32)
    with ld.dump(layer, path=tmp_path, mode="aten") as run, torch.no_grad():
        layer(x)
    with torch.no_grad(), Counter_():
        layer(x)
    computing = [
        name
        for name in names
        if name not in ("aten::t", "aten::view", "aten::_unsafe_view", "aten::transpose")
    ]
    operators = {value: path for (path, _), value in run.ids().items() if "/" in path}
    assert len(operators) == len(computing)
    assert operators["0.0"] == "gate_proj/Aten.mm"
    assert operators[".0"] == "/Aten.mul.Tensor"


def test_only_selected_ids_are_recorded_with_or_without_the_calls_inside_them(
    tmp_path: Path,
) -> None:
    model = llama()
    for children in (True, False):
        with ld.dump(
            model, path=tmp_path, ids=["0_2_0", "0_3"], children=children, mode="module+aten"
        ) as run:
            generate(model, new=2)
        for step in (0, 1):
            ids = run.ids(step)
            seen = {ids[r.site.path, r.site.call] for r in run.records(step=step)}
            below = {i for i in ids.values() if i.startswith(("0_2_0", "0_3"))}
            expected = below if children else {"0_2_0", "0_3"}
            assert seen == expected


def test_one_operator_is_recorded_by_its_id(tmp_path: Path) -> None:
    model = llama()
    with ld.dump(model, path=tmp_path, ids="0_2_0.1", mode="aten") as run:
        generate(model, new=2)
    assert {r.site.path for r in run.records()} == {"model.layers.0.input_layernorm/Aten.mean.dim"}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("9", "no call has the id 9; nearest: 0 to 1 in the root"),
        ("0_2_7", "no call has the id 0_2_7; nearest: 0_2_0 to 0_2_3 in call 0_2"),
        ("0_2_0.1", "no operator was seen in call 0_2_0, they count where mode is api or aten"),
    ],
)
def test_an_id_that_does_not_exist_names_the_nearest(
    ids: str, message: str, tmp_path: Path
) -> None:
    model = llama()
    with (
        pytest.raises(ld.errors.EmptyDumpError, match="nothing was recorded") as error,
        ld.dump(model, path=tmp_path, ids=ids),
    ):
        generate(model, new=2)
    assert message in str(error.value)
    assert hooks_left(model) == 0


def test_some_ids_that_do_not_exist_are_a_note(tmp_path: Path) -> None:
    model = llama()
    with ld.dump(model, path=tmp_path, ids="0_1,7") as run:
        generate(model, new=2)
    assert run.meta["notes"] == ["no call has the id 7; nearest: 0 to 1 in the root"]


@pytest.mark.parametrize(
    "ids", ["a", "1_", "_1", "1__2", "1.2.3", "1;2", ["1", 2.5], "", "1,,2", True, -1, "1" * 20]
)
def test_ids_that_make_no_sense_are_refused_in_one_line(ids: Any) -> None:
    with pytest.raises(ld.errors.OptionError, match="ids") as error:
        DumpOptions(ids=ids)
    assert "\n" not in str(error.value)


def test_children_off_without_ids_records_the_layers_alone(tmp_path: Path) -> None:
    model = llama()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for mode in ("module", "module+aten"):
            with ld.dump(model, path=tmp_path, name=mode[-4:], children=False, mode=mode) as run:
                model(ids)
            layers = {f"model.layers.{number}" for number in range(len(model.model.layers))}
            assert {record.site.path for record in run.records()} == layers
        flat = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        with ld.dump(flat, path=tmp_path, name="flat", children=False) as run:
            flat(torch.ones(1, 2))
        assert {record.site.path for record in run.records()} == {"0", "1"}


def test_a_child_that_raises_does_not_hold_the_calls_after_it(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.last = Fails(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.fails(x)
            except RuntimeError:
                return self.last(x)

    model = Model()
    with ld.dump(model, path=tmp_path) as run:
        model(torch.ones(1, 2))
    assert run.ids() == {("", 0): "", ("fails", 0): "0", ("last", 0): "1"}


class Tree(nn.Module):
    """Calls its children in the order of ``plan``, some more than once."""

    def __init__(self, children: list[Tree], plan: list[int]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.parts = nn.ModuleList(children)
        self.plan = [i % len(children) for i in plan] if children else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.plan:
            x = self.parts[i](x)
        return x * self.scale


TREES = st.recursive(
    st.builds(Tree, st.just([]), st.just([])),
    lambda inner: st.builds(
        Tree, st.lists(inner, min_size=1, max_size=3), st.lists(st.integers(0, 5), max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(tree=TREES)
def test_any_tree_of_modules_is_counted_as_plain_hooks_count_it(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory
) -> None:
    x = torch.ones(2)
    with ld.dump(tree, path=tmp_path_factory.mktemp("ids"), stats_only=True) as run:
        tree(x)
    assert run.ids() == counted(tree, lambda: tree(x))
    assert len(set(run.ids().values())) == len(run.ids())


@settings(max_examples=25, deadline=None)
@given(tree=TREES, data=st.data())
def test_in_any_tree_a_module_that_is_recorded_alone_has_the_id_that_it_has_among_all(
    tree: Tree, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    x = torch.ones(2)
    every = counted(tree, lambda: tree(x))
    path = data.draw(st.sampled_from(sorted({path for path, _ in every} - {""}) or [""]))
    with ld.dump(
        tree, path=tmp_path_factory.mktemp("ids"), stats_only=True, layers=path or None
    ) as run:
        tree(x)
    found = run.ids()
    assert found.items() <= every.items()
    assert {key for key in every if key[0] == path} <= found.keys()


def test_a_recording_of_one_layer_leaves_the_insides_of_the_others_alone(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=6)
    hooked: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: hooked.append(hooks_left(model)))
    with ld.dump(model, path=tmp_path, layers="model.layers.0.mlp"):
        model(prompt())
    # two each: the root, model, lm_head, what model holds (embeddings, rotary, norm, six layers)
    # and the four parts of layer 0; one of the test's
    assert hooked == [2 * (3 + 9 + 4) + 1]


def test_processes_of_one_rank_have_ids_in_their_own_generations(tmp_path: Path) -> None:
    code = (
        "import llmdebug_nb as ld, torch; from llmdebug_nb.core.options import DumpOptions; "
        "from llmdebug_nb.app.recording import Recording\n"
        "import llmdebug_nb.store.writer as w, llmdebug_nb.app.recording as r, sys; from "
        "pathlib import Path\n"
        "made = r.create_run\n"
        "def again(parent, name, details):\n"
        "    return Path(parent) / name if (Path(parent) / name).exists() else made(parent, "
        "name, details)\n"
        "r.create_run = again\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(int(sys.argv[1]))])\n"
        f"with ld.dump(model, path={str(tmp_path)!r}): model(torch.ones(1, 2))\n"
    )
    for layers in ("2", "3"):
        subprocess.run([sys.executable, "-c", code, layers], check=True)
    run = ld.open_run(tmp_path / "run")
    assert [len(run.ids(0, generation)) for generation in (0, 1)] == [3, 4]
    files = ld.write_topology(run, tmp_path / "out")
    assert sorted(
        len(json.loads(file.read_text(encoding="utf-8"))["nodes"])
        for file in files
        if "model" in file.parts
    ) == [2, 3]


def test_a_dump_from_before_there_were_ids_opens_without(tmp_path: Path) -> None:
    with ld.dump(model := llama(), path=tmp_path) as run:
        model(prompt())
    change_index(tmp_path, "DROP TABLE calls")
    old = ld.open_run(tmp_path / "run")
    assert old.ids() == {}
    assert len(old) == len(run)
    names = [op.name for _, op in ld.topology(old).root.walk() if op.type != "Unrecorded"]
    assert names == [op.name for _, op in ld.topology(run).root.walk() if op.type != "Unrecorded"]


def test_atb_dumps_have_the_ids_that_their_paths_say(tmp_path: Path) -> None:
    header = (
        b"$Version=1.0\n$Object.Count=1\n$Object.Length=8\n"
        b"format=2\ndtype=0\ndims=2\n$Object.data=0,8\n$End=1\n" + bytes(8)
    )
    base = tmp_path / "msit_dump_20250101_000000/tensors/0_42/0"
    for path in (
        "10_Layer/before/intensor0",
        "10_Layer/0_Norm.x/after/outtensor0",
        "10_Layer/1_Linear/after/outtensor0",
        "2_Embed/after/outtensor0",
    ):
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / f"{path}.bin").write_bytes(header)
    run = ld.open_run(tmp_path)
    assert list(run.ids().items()) == [
        (("2_Embed", 0), "2"), (("10_Layer", 0), "10"), (("10_Layer.0_Norm.x", 0), "10_0"),
            (("10_Layer.1_Linear", 0), "10_1"),
    ]  # fmt: skip
    assert "10_Layer.1_Linear" in str(ld.topology(run))


def listed(view: Any, text: str) -> set[str]:
    page = view.rows({"op": "rows", "step": 0, **EVERYTHING, "text": text, "start": 0, "n": 1000})
    return (page["problem"] and {page["problem"]}) or {row["path"] for row in page["rows"]}


def test_explorers_show_ids_and_are_narrowed_by_them(tmp_path: Path) -> None:
    model = llama()
    for name in ("golden", "mine"):
        with ld.dump(model, path=tmp_path, name=name, mode="module+aten", stats_only=True):
            model(prompt())
    run = ld.open_run(tmp_path / "golden")
    views = [RunView(run), ld.compare(run, tmp_path / "mine", explain=False).view()]
    ids = run.ids()
    for view in views:
        expected = {
            path
            for (path, _), one in ids.items()
            if one == "0_2_0" or one.startswith(("0_2_0_", "0_2_0."))
        }
        assert listed(view, "id:0_2_0") == expected
        assert listed(view, "id:0_2_0.1") == {"model.layers.0.input_layernorm/Aten.mean.dim"}
        assert listed(view, "id:0_2_0.1 id:1") == {
            "model.layers.0.input_layernorm/Aten.mean.dim",
            "lm_head",
            "lm_head/Aten.mm",
        }
        assert listed(view, "id:77") == set()
        assert listed(view, "id:x") == {
            "can't read the filter 'id:x': id: needs an execution id, as in id:3_1 or id:3_1.4"
        }
        row = view.find("model.layers.1.mlp", 0, "output")
        assert view.detail({"op": "detail", "row": row})["sides"][0]["call_id"] == "0_3_3"


@pytest.mark.parametrize(
    "options", [{"ids": "0_2_1"}, {"layers": "lm_head"}, {"ids": "0_2_1", "mode": "aten"}], ids=str
)
def test_counting_changes_no_result(options: dict[str, Any], tmp_path: Path) -> None:
    model = llama().train()

    def step() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(prompt(), labels=prompt()).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    plain = step()
    with ld.dump(model, path=tmp_path, **options):
        recorded = step()
    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    assert hooks_left(model) == 0
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), ld.dump(model, path=tmp_path, **options):
        step()
    assert hooks_left(model) == 1  # that of the test


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ids_as_msit_counts_are_the_places_in_the_topology_that_has_layers_at_its_top(
    name: str, tmp_path: Path
) -> None:
    model = ARCHITECTURES[name]()
    with ld.dump(model, path=tmp_path, tokens="all", stats_only=True) as run:
        generate(model, new=2)
    expected: dict[str, str] = {}

    def count(nodes: list[dict[str, Any]], above: str) -> None:
        for number, node in enumerate(node for node in nodes if node["id"]):
            expected[node["id"]] = f"{above}{number}"
            count(node["nodes"], f"{above}{number}_")

    count(ld.topology(run).to_json()["nodes"], "")
    ids = run.ids()
    assert {ids[call]: number for call, number in run.msit_ids().items()} == expected
    assert run.msit_ids(0) == run.msit_ids(1)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_a_call_is_the_same_by_the_id_that_msit_counts(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, model = tmp_path_factory.mktemp("runs"), llama()
    with ld.dump(model, path=folder, name="all", mode="module+aten", stats_only=True) as run:
        model(prompt())
    call = data.draw(st.sampled_from(sorted(run.msit_ids())))
    children = data.draw(st.booleans())
    recorded = []
    for id_ in (run.ids()[call], f"msit:{run.msit_ids()[call]}"):
        with ld.dump(
            model, path=folder, ids=id_, children=children, mode="module+aten", stats_only=True
        ) as some:
            model(prompt())
        recorded.append([(r.site.path, r.site.call) for r in some.records()])
    assert recorded[0] == recorded[1]
    assert recorded[0]


def test_layer_0_of_a_llama_is_2_as_msit_counts_and_the_topology_shows_both(tmp_path: Path) -> None:
    model = llama()
    with ld.dump(model, path=tmp_path, ids=["msit:2", "0_3_0"], stats_only=True) as run:
        model(prompt())
    paths = {record.site.path for record in run.records()}
    assert {path.split(".")[2] for path in paths if path != "model.layers.1.input_layernorm"} == {
        "0"
    }
    assert run.msit_ids()["model.layers.0", 0] == "2"
    assert "model" not in {path for path, _ in run.msit_ids()}
    assert "0_2  msit:2 " in str(ld.topology(run))


def test_an_id_of_msit_that_no_call_has_is_named_beside_those_that_exist(tmp_path: Path) -> None:
    model = llama()
    with (
        pytest.raises(EmptyDumpError, match="no call has the id msit:9; nearest: msit:0 to msit:5"),
        ld.dump(model, path=tmp_path, ids="msit:9"),
    ):
        model(prompt())
    with ld.dump(model, path=tmp_path, ids="9,msit:2", stats_only=True) as run:
        model(prompt())
    assert any(
        "no call has the id 9; nearest: 0 to 1 in the root" in note for note in run.meta["notes"]
    )
