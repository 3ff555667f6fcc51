"""The recorded tensors are complete and right."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb import msit
from llmdebug_nb.core import paths
from models import generate, hooks_left, llama, prompt


def _record(module, *args, **kwargs):
    with ld.dump(module, name="r", tokens="all") as run:
        module(*args, **kwargs)
    return run


def _slots(run, path, role):
    frame = run.to_pandas()
    return list(frame[(frame.path == path) & (frame.role == role)].slot)


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None


class Everything(nn.Module):
    """Gives every kind of output from every kind of argument."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, *more, scale=1.0, mask=None, nested=None):
        return {
            "plain": x * self.weight,
            "nothing": None,
            "tuple": (x + 1, None, [x + 2, {"deep": x + 3}]),
            "pair": Pair(x + 4, None),
            "count": 3,
        }


class Root(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_every_argument_and_every_output_has_its_slot():
    x = torch.randn(2, 3)
    run = _record(
        Root(Everything()), x, x + 10, scale=0.5, mask=x > 0, nested={"a": [x, None, x + 1]}
    )
    assert _slots(run, "inner", "input") == [
        "0",
        "1",
        "kwargs.mask",
        "kwargs.nested.a.0",
        "kwargs.nested.a.2",
    ]
    assert _slots(run, "inner", "output") == [
        "plain",
        "tuple.0",
        "tuple.2.0",
        "tuple.2.1.deep",
        "pair.left",
    ]
    assert torch.equal(run.tensor("inner", slot="tuple.2.1.deep"), x + 3)
    scalars = run.scalars("inner")
    assert list(scalars[scalars.role == "output"].slot) == [
        "nothing",
        "tuple.1",
        "pair.right",
        "count",
    ]
    assert scalars[scalars.slot == "kwargs.scale"].value.item() == "0.5"


def test_the_model_output_of_a_hugging_face_root_is_recorded():
    model = llama()
    run = _record(model, input_ids=prompt(), output_hidden_states=True)
    assert _slots(run, "", "output") == ["logits", *(f"hidden_states.{i}" for i in range(3))]
    assert torch.equal(run.tensor("", slot="logits"), model(prompt()).logits)
    assert "past_key_values" in set(run.scalars("").slot)


def test_inputs_by_keyword_alone_are_recorded_also_when_the_root_had_to_be_found():
    model = llama()
    with ld.dump(name="r") as run:
        model(input_ids=prompt())
    assert torch.equal(run.tensor("", role="input", slot="kwargs.input_ids"), prompt())
    assert "kwargs.hidden_states" in _slots(run, "model.layers.0.self_attn", "input")


def test_repeated_calls_are_numbered_and_all_kept():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(self.layer(x)))

    module, x = Twice(), torch.randn(2, 3)
    run = _record(module, x)
    expected = x
    for call in range(3):
        expected = module.layer(expected)
        assert torch.equal(run.tensor("layer", call=call), expected)


def test_a_tied_module_has_one_row_and_answers_to_all_its_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    module, x = Tied(), torch.randn(2, 3)
    run = _record(module, x)
    assert [node.aliases for node in run.nodes if node.path == "first"] == [("second",)]
    assert torch.equal(run.tensor("second", call=1), module(x))
    with ld.dump(module, name="alias", layers="second") as run:
        module(x)
    assert set(run.to_pandas().path) == {"first"}


def test_what_a_module_changes_in_place_is_recorded_as_it_was_before_the_call():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x.mul_(2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = InPlace(), InPlace()

        def forward(self, x):
            return self.b(self.a(x)).add_(1)

    with torch.no_grad():
        run = _record(Outer(), torch.ones(3))
    values = [
        run.tensor(path, role=role)[0].item() for path in ("a", "b") for role in ("input", "output")
    ]
    assert values == [1, 2, 2, 4]
    assert run.tensor("")[0].item() == 5


def test_in_place_changes_are_seen_under_inference_mode_too():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x.mul_(2)

    with torch.inference_mode():
        run = _record(Root(InPlace()), torch.ones(3))
    assert run.tensor("inner", role="input")[0].item() == 1
    assert run.tensor("inner", role="output")[0].item() == 2


def test_a_tensor_seen_again_is_kept_once_and_says_who_made_it():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.b(self.a(x))

    run = _record(Chain(), torch.randn(8, 64))
    made = run.find("a")
    used = run.find("b", role="input")
    assert used.producer == made.id
    assert used.payload == made.payload
    nbytes = 8 * 64 * 4
    assert 3 * nbytes <= run.info()["bytes"] < 4 * nbytes  # of six records, three tensors


KINDS = {
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(5),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "float16": torch.randn(3, 4).half(),
    "float64": torch.randn(3, 4).double(),
    "float8_e4m3fn": torch.randn(3, 4).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.randn(3, 4).to(torch.float8_e5m2),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "conjugate view": torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": torch.randn(3, dtype=torch.complex64).conj().imag,
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.randn(1, 4).expand(3, 4),
    "odd stride": torch.randn(4, 1).as_strided((1, 4), (7, 1)),
    "nan and inf": torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_comes_back_bit_for_bit(kind):
    value = KINDS[kind]
    run = _record(Root(nn.Identity()), value)
    back = run.tensor("inner")
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert torch.equal(_bits(back), _bits(value))


def _bits(tensor):
    """Return the bytes of a tensor's elements, without the code under test."""
    plain = tensor.resolve_conj().resolve_neg().reshape(-1).clone()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).view(torch.uint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.randn(3, 4, device="meta"), "meta"),
        (
            torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
            "",
        ),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_what_cannot_be_kept_is_counted_and_said(value, why):
    run = _record(Root(nn.Identity()), value)
    lost = run.meta["lost"]
    assert sum(lost.values()) == run.info()["lost"] >= 1
    assert any(why in reason for reason in lost)
    with pytest.raises(ld.errors.TensorLookupError, match="has no values"):
        run.tensor("inner")
    from llmdebug_nb.app.runs import describe_run

    assert "not kept" in describe_run(run)


def test_filters_by_path_type_and_part():
    model = llama()
    with ld.dump(
        model, name="r", layers="model.layers.*.mlp.*", types=nn.Linear, part="out"
    ) as run:
        model(prompt())
    frame = run.to_pandas()
    assert set(frame.role) == {"output"}
    assert set(frame.op) == {"Linear"}
    assert set(frame.path) == {
        f"model.layers.{i}.mlp.{n}_proj" for i in range(2) for n in ("gate", "up", "down")
    }
    with ld.dump(model, name="r", types=["LlamaRMSNorm", nn.Embedding], part="in") as run:
        model(prompt())
    assert set(run.to_pandas().op) == {"LlamaRMSNorm", "Embedding"}


def test_statistics_only_keeps_no_values_and_the_same_figures():
    model = llama()
    whole = _record(model, prompt())
    with ld.dump(model, name="s", stats_only=True) as run:
        model(prompt())
    columns = ["path", "role", "slot", "min", "max", "mean", "l2norm", "zero", "fingerprint"]
    assert run.to_pandas()[columns].equals(whole.to_pandas()[columns])
    assert run.info()["payloads"] == 0
    with pytest.raises(ld.errors.TensorLookupError, match="statistics only"):
        run.tensor("lm_head")


def test_a_seed_makes_sampling_repeatable():
    model = llama()
    texts = []
    for _ in range(2):
        with ld.dump(model, name="r", seed=3):
            texts.append(generate(model, do_sample=True))
    assert torch.equal(*texts)


def test_two_sessions_at_once_record_both():
    model = llama()
    with (
        ld.dump(model, name="outer") as outer,
        ld.dump(model, name="inner", layers="lm_head") as inner,
    ):
        model(prompt())
    assert set(inner.to_pandas().path) == {"lm_head"}
    assert len(outer) > len(inner)
    assert hooks_left(model) == 0


def test_two_models_in_one_block_stay_apart():
    a, b = llama(), llama(seed=1)
    with ld.dump(name="r") as run:
        a(prompt())
        b(prompt())
    assert torch.equal(run.tensor("lm_head"), a(prompt()).logits)
    assert torch.equal(run.tensor("LlamaForCausalLM~1.lm_head"), b(prompt()).logits)


def test_hooks_of_the_user_are_seen_in_what_is_recorded():
    model = llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    run = _record(model, prompt())
    assert torch.equal(
        run.tensor("model.layers.0.mlp"), run.tensor("model.layers.0.mlp.down_proj") * 2
    )


def test_a_filter_that_matches_nothing_is_refused_before_the_model_runs():
    model = llama()
    ran = []
    with (
        pytest.raises(ld.errors.EmptyDumpError, match=r"model\.layer\.\*.*nearest: model\.layers"),
        ld.dump(model, layers="model.layer.*"),
    ):
        ran.append(model(prompt()))
    assert not ran
    with (
        pytest.raises(ld.errors.EmptyDumpError, match=r"types 'Linaer'.*Linear"),
        ld.dump(model, types="Linaer"),
    ):
        pass
    assert hooks_left(model) == 0
    assert ld.runs() == []


def test_empty_dumps_explain_themselves_and_leave_nothing():
    model = llama()
    with pytest.raises(ld.errors.EmptyDumpError, match="no module was called"), ld.dump(name="r"):
        pass
    with (
        pytest.raises(ld.errors.EmptyDumpError, match=r"tokens 5-9 never came; steps seen: 0-2"),
        ld.dump(model, name="r", tokens="5-9"),
    ):
        generate(model, new=3)
    with (
        pytest.raises(ld.errors.EmptyDumpError, match=r"goes past hooks"),
        ld.dump(model, name="r"),
    ):
        pass
    with (
        pytest.raises(ld.errors.EmptyDumpError, match="matches none"),
        ld.dump(name="r", layers="nowhere"),
    ):
        model(prompt())
    assert ld.runs() == []
    assert hooks_left(model) == 0


def test_a_compiled_model_is_refused_with_a_sentence():
    model = torch.compile(llama())
    with pytest.raises(ld.errors.CaptureError, match=r"compiled by torch\.compile"), ld.dump(model):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "a-b"}, "tokens 'a-b'"),
        ({"tokens": "5-2"}, "write 2-5"),
        ({"part": "inputs"}, "both, in, out"),
        ({"mode": "apis"}, "mode 'apis'"),
        ({"layer": "x"}, "nearest: layers"),
        ({"name": "../x"}, "name '../x'"),
        ({"types": 3}, "types 3"),
        ({"seed": -1}, "seed -1"),
        ({"warmup": -1}, "warmup -1"),
    ],
)
def test_options_that_make_no_sense_are_named(options, message):
    with pytest.raises(ld.errors.OptionError, match=message):
        ld.dump(llama(), **options)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(
        ld.errors.OptionError,
        match=r"an onnxruntime.InferenceSession, an openvino.CompiledModel, "
        r"a vllm.LLM or a llama_cpp.Llama, got int",
    ):
        ld.dump([1])


def test_dump_config_and_register_hook_record_the_same(tmp_path):
    model = llama()
    config = msit.DumpConfig(
        dump_path=tmp_path,
        token_range=[0, 2],
        module_list=[nn.Linear],
        tensor_part=1,
        layer_name="*mlp*",
    )
    hook = msit.register_hook(model, config)
    generate(model, new=4)
    run = hook.stop()
    frame = run.to_pandas()
    assert set(frame.step) == {0, 2}
    assert set(frame.role) == {"output"}
    assert set(frame.op) == {"Linear"}
    assert ld.open_run(tmp_path).path == run.path
    again = msit.register_hook(model, msit.DumpConfig(dump_path=tmp_path, dump_statistics_mode=1))
    generate(model, new=2)
    second = again.remove()
    assert second.path != run.path
    assert second.info()["payloads"] == 0
    assert hooks_left(model) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_range": 3}, "token_range"),
        ({"tensor_part": 3}, "tensor_part"),
        ({"dump_statistics_mode": 5}, "dump_statistics_mode"),
        ({"mode": "kernel"}, "mode"),
        ({"device_id": "0"}, "device_id"),
    ],
)
def test_dump_config_refuses_what_it_does_not_carry_out(arguments, message):
    with pytest.raises(ld.errors.OptionError, match=message):
        msit.DumpConfig(**arguments)


def test_a_registered_hook_is_finished_when_the_process_ends(tmp_path):
    script = (
        "import torch, llmdebug_nb.msit\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 3))\n"
        f"llmdebug_nb.msit.register_hook(model, "
        f"llmdebug_nb.msit.DumpConfig(dump_path={str(tmp_path)!r}))\n"
        "model(torch.ones(1, 3))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    run = ld.open_run(tmp_path)
    assert run.info()["complete"]
    assert run.tensor("0").shape == (1, 3)


def test_a_forked_child_does_not_write_into_the_dump():
    import os

    model, x = (
        Root(nn.Identity()),
        torch.ones(3),
    )  # no matrix product: OpenMP hangs in forked children
    with ld.dump(model, name="r", tokens="all") as run:
        model(x)
        pid = os.fork()
        if pid == 0:
            model(x)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert len(run.root_calls()) == 1
    assert run.info()["complete"]


def test_gradient_checkpointing_recomputes_without_being_recorded_twice():
    model = llama().train()
    model.gradient_checkpointing_enable()
    with ld.dump(model, name="r", tokens="all") as run:
        model(input_ids=prompt(), labels=prompt()).loss.backward()
    frame = run.to_pandas()
    outputs = frame[
        (frame.path == "model.layers.0.mlp") & (frame.role == "output") & (frame.phase == "forward")
    ]
    assert list(outputs.call) == [0]


def test_deep_copies_of_a_recorded_model_stay_free_of_hooks_after_the_block():
    model = llama()
    with ld.dump(model, name="r"):
        model(prompt())
    assert hooks_left(copy.deepcopy(model)) == 0


# -- what goes past a first implementation ----------------------------------------------------


class Step(nn.Module):
    """A module that runs a given function; its parameter makes it a possible root."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(1))

    def forward(self, *args):
        return self.function(*args)


def test_a_write_that_goes_past_the_version_counter_is_seen():
    def scale(x):
        x.data.mul_(1000)
        return x

    run = _record(Root(Step(scale)), torch.ones(3))
    assert run.tensor("inner", role="input")[0].item() == 1
    assert run.tensor("inner")[0].item() == 1000
    assert run.tensor("")[0].item() == 1000


def test_threads_on_one_model_lose_nothing_and_number_their_own_calls():
    import threading

    model = llama()
    generate(model)
    with ld.dump(model, name="r", tokens="0-1") as run:
        threads = [
            threading.Thread(target=generate, args=(model,), kwargs={"new": 6}) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    frame = run.to_pandas()
    assert len(frame) == 3 * 2 * 80
    assert set(frame.call) == {0}
    assert set(frame.generation) == {0, 1, 2}
    assert hooks_left(model) == 0


def test_a_root_that_calls_itself_is_one_step():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, depth=2):
            x = self.a(x)
            x = self(x, depth - 1) if depth else x
            return self.b(x)

    run = _record(Again(), torch.ones(1, 2))
    assert len(run.root_calls()) == 1
    frame = run.to_pandas()
    for path in ("", "a", "b"):
        assert sorted(frame[(frame.path == path) & (frame.role == "output")].call) == [0, 1, 2]


def test_after_a_caught_interrupt_another_model_is_still_found():
    def stop(x):
        raise KeyboardInterrupt

    broken, fine = Root(Step(stop)), nn.Sequential(nn.Linear(3, 3))
    with ld.dump(name="r") as run:
        with pytest.raises(KeyboardInterrupt):
            broken(torch.ones(3))
        fine(torch.ones(1, 3))
    assert [call.root for call in run.root_calls()] == ["Root", "Sequential~1"]


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_sizes_does_not_take_the_others_with_it():
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    run = _record(Root(Step(lambda x: (nested, x))), torch.ones(3))
    assert _slots(run, "inner", "output") == ["0", "1"]
    assert torch.equal(run.tensor("inner", slot="1"), torch.ones(3))
    assert sum(run.meta["lost"].values()) == 2  # of the module and of its root


def test_tensors_in_any_container_are_found():
    from collections import deque
    from types import SimpleNamespace

    def pack(x):
        return (
            deque([x]),
            {"a": x + 1}.values(),
            SimpleNamespace(left=x + 2, note="text"),
            [[x + 3]],
        )

    run = _record(Root(Step(pack)), torch.ones(3))
    assert _slots(run, "inner", "output") == ["0.0", "1.0", "2.left", "3.0.0"]


def test_two_ways_never_have_one_slot_name():
    run = _record(Root(Step(lambda x: {"a.b": x, "a": {"b": x + 1}})), torch.ones(3))
    assert _slots(run, "inner", "output") == ["a\\.b", "a.b"]
    assert ld.compare(run, run).verdict == "match"


def test_a_container_that_holds_itself_ends():
    def loop(x):
        found = [x]
        found += [found, found]
        return found

    assert len(_slots(_record(Root(Step(loop)), torch.ones(3)), "inner", "output")) == 1


def test_transformers_imported_inside_the_block_is_watched_too(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import llmdebug_nb as ld\n"
        f"with ld.dump(name='r', tokens='all', path={str(tmp_path)!r}) as run:\n"
        "    from models import generate, llama\n"
        "    model = llama(); generate(model, new=2); generate(model, new=2)\n"
        "print([(c.generation, c.step, c.kind) for c in run.root_calls()])\n"
        "from transformers import GenerationMixin\n"
        "assert 'llmdebug' not in GenerationMixin.generate.__code__.co_filename\n"
        "assert not [finder for finder in sys.meta_path if 'llmdebug' in type(finder).__module__]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, encoding="utf-8"
    )
    assert (
        done.stdout.strip()
        == "[(0, 0, 'prefill'), (0, 1, 'decode'), (1, 0, 'prefill'), (1, 1, 'decode')]"
    )


def test_registrations_may_end_in_any_order(tmp_path):
    from transformers import GenerationMixin

    before = GenerationMixin.generate
    model = llama()
    first, second = (
        msit.register_hook(
            model, msit.DumpConfig(name=name, token_range=[0, 1], dump_path=tmp_path)
        )
        for name in ("a", "b")
    )
    generate(model, new=2)
    first.stop()
    generate(model, new=2)
    run = second.stop()
    assert [(c.generation, c.step) for c in run.root_calls()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert GenerationMixin.generate is before


def test_generate_of_a_model_around_the_recorded_part_gives_its_steps():
    model = llama()
    with ld.dump(model.model, name="r", tokens="all") as run:
        generate(model, new=2)
        generate(model, new=2)
    assert [(c.generation, c.step) for c in run.root_calls()] == [(0, 0), (0, 1), (1, 0), (1, 1)]


class _Tuner(nn.Module):
    """Wraps a model as an adapter library does: `generate` goes past its own forward."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def generate(self, *args, **more):
        return self.base_model.model.generate(*args, **more)


@pytest.mark.parametrize("tokens", ["all", "1"])
def test_generate_of_a_wrapper_finds_the_model_that_it_calls_levels_below(tokens):
    plain, wrapper = llama(), _Tuner(llama())
    expected = generate(plain, new=3)
    with ld.dump(wrapper, name="r", tokens=tokens) as run:
        ids = generate(wrapper, new=3)
    assert torch.equal(ids, expected)
    assert [(c.generation, c.step) for c in run.root_calls()] == [(0, 0), (0, 1), (0, 2)]
    assert set(run.to_pandas().step) == ({0, 1, 2} if tokens == "all" else {1})
    assert "base_model.model.model.layers.0.mlp" in set(run.to_pandas().path)
    assert hooks_left(wrapper) == 0


def test_an_embedding_called_before_the_model_begins_no_root_call():
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        model(inputs_embeds=model.model.embed_tokens(prompt()))
    assert [c.step for c in run.root_calls()] == [0]


def test_the_watch_for_a_first_call_ends_with_it():
    model, watched = llama(), []
    registered = nn.modules.module._global_forward_pre_hooks

    with ld.dump(model, name="r", tokens="all"):
        watched.append(len(registered))
        model(prompt())
        watched.append(len(registered))
    assert watched == [1, 0]


def test_parts_called_one_after_the_other_are_one_step():
    model = llama()
    with ld.dump(model, name="r", tokens="0-1") as run:
        for _ in range(2):
            model.lm_head(model.model(prompt()).last_hidden_state)
    assert [(c.step, c.index) for c in run.root_calls()] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert run.tensor("lm_head", step=1).shape == (1, 7, 96)


def test_recomputation_in_backward_is_no_step():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.a, x, use_reentrant=False)

    module = Checkpointed()
    with ld.dump(module, name="r", tokens="all") as run:
        for _ in range(2):
            module(torch.ones(1, 3)).sum().backward()
    assert [c.step for c in run.root_calls()] == [0, 1]
    assert set(run.to_pandas().call) == {0}


@pytest.mark.filterwarnings("ignore")
def test_tracing_and_exporting_inside_the_block_go_on_as_without_it():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.ones(1, 3)
    expected = module(x)
    with ld.dump(module, name="r", tokens="all") as run:
        module(x)
        traced = torch.jit.trace(module, x, check_trace=False)
        exported = torch.export.export(module, (x,))
        module(x)
    assert torch.equal(traced(x), expected)
    assert torch.equal(exported.module()(x), expected)
    assert [c.step for c in run.root_calls()] == [0, 1]
    assert run.info()["complete"]


@pytest.mark.filterwarnings("ignore")
def test_lazy_modules_are_recorded_and_scripted_ones_refused():
    lazy = nn.Sequential(nn.LazyLinear(4))
    with ld.dump(name="r") as run:
        lazy(torch.ones(1, 3))
    assert run.tensor("0").shape == (1, 4)
    with pytest.raises(ld.errors.CaptureError, match="TorchScript"):
        ld.dump(torch.jit.script(nn.Sequential(nn.Linear(2, 2)))).start()


def test_a_refused_recording_leaves_no_file_open():
    model = llama()
    for _ in range(3):
        with pytest.raises(ld.errors.EmptyDumpError):
            ld.dump(model, layers="nowhere").start()
    runs = os.environ["LLMDEBUG_RUNS"]
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(os.path.realpath(runs))] == []


@pytest.mark.parametrize("stats_only", [False, True], ids=["tensors", "statistics only"])
def test_the_way_of_accelerator_tensors_gives_the_same_records(monkeypatch, stats_only):
    """Send CPU tensors the way of a device's: their figures are read together after a call."""
    from llmdebug_nb.capture import recorder, waiting_rows
    from llmdebug_nb.capture.tape import native

    model = llama()

    def record(name):
        with ld.dump(model, name=name, tokens="0-2", stats_only=stats_only) as run:
            generate(model, new=3)
        return run

    plain = record("host")
    read_backs = []
    original = waiting_rows.on_device.figures
    monkeypatch.setattr(recorder, "on_host", lambda tensor: False)
    monkeypatch.setattr(native, "_make", lambda: None)  # as on devices that are none of CUDA
    monkeypatch.setattr(
        waiting_rows.on_device,
        "figures",
        lambda measured: (read_backs.append(len(measured)), original(measured))[1],
    )
    device = record("device")
    assert len(read_backs) == 3  # once a step
    columns = [
        "step",
        "path",
        "call",
        "role",
        "slot",
        "dtype",
        "shape",
        "min",
        "max",
        "nan",
        "inf",
        "zero",
        "producer",
        "kept",
    ]
    a, b = plain.to_pandas(), device.to_pandas()
    assert a[columns].equals(b[columns])
    assert (a[["mean", "l2norm"]] - b[["mean", "l2norm"]]).abs().max().max() < 1e-9
    if stats_only:
        assert b.fingerprint.isna().all()
    else:
        assert a.fingerprint.equals(b.fingerprint)
        assert device.info()["bytes"] < 1.2 * plain.info()["bytes"]
        assert torch.equal(device.tensor("lm_head", step=2), plain.tensor("lm_head", step=2))


def test_modules_with_long_names_and_deep_nests_are_recorded_and_read(tmp_path):
    model = nn.Sequential()
    for name in ("a" * 1500 + "1", "a" * 1500 + "2"):
        model.add_module(name, nn.Linear(2, 2))
    deep = nn.Linear(2, 2)
    for _ in range(230):
        deep = nn.Sequential(deep)
    model.add_module("deep", deep)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        with ld.dump(model, name="long", path=tmp_path, mode="module+api+aten") as run:
            model(torch.ones(1, 2))
    finally:
        sys.setrecursionlimit(before)
    again = ld.open_run(run.path)
    found = {node.path for node in again.nodes}
    assert len(found) == len(list(model.modules()))
    assert max(map(len, found)) <= 1000
    outputs = {record.site.path for record in again.records(role="output")}
    assert found <= outputs
    for name in ("a" * 1500 + "1", "a" * 1500 + "2", "deep" + ".0" * 230):
        path = paths.bounded(name)
        assert "--" in path
        assert torch.equal(again.tensor(path), run.tensor(path))
        assert torch.equal(again.tensor(name), run.tensor(path))
    assert str(ld.compare(again, again, progress=False))
    assert str(again)
    ld.export(again, tmp_path / "page.html")


class Late(torch.nn.Module):
    """Registers the module that holds its parameters when it is asked for them, as Keras does."""

    def __init__(self):
        super().__init__()
        self.weights = [torch.nn.Parameter(torch.ones(4, 4))]

    def named_parameters(self, *args, **options):
        if "held" not in self._modules:
            self.held = torch.nn.ParameterList(self.weights)
        return super().named_parameters(*args, **options)

    def forward(self, x):
        return x @ self.weights[0]


def test_modules_that_appear_when_their_parameters_are_asked_for_are_recorded():
    model = torch.nn.Sequential(Late(), Late())
    with ld.dump(model, name="late") as run:
        model(torch.ones(2, 4))
    assert [node.path for node in run.nodes] == ["", "0", "0.held", "1", "1.held"]
    assert run.tensor("1").shape == (2, 4)


@pytest.mark.parametrize("has_forward", [True, False])
@pytest.mark.parametrize("layers", [None, "fc"])
def test_a_dict_of_modules_is_recorded_as_root_whether_it_is_called_or_not(
    tmp_path, has_forward, layers
):
    model = nn.ModuleDict({"fc": nn.Linear(3, 3)})
    if has_forward:
        model.forward = lambda x: model["fc"](x)
    with ld.dump(model, name="root", path=tmp_path, layers=layers) as run:
        (model if has_forward else model["fc"])(torch.ones(1, 3))
    outputs = {r.site.path for r in run.records() if r.site.role == "output"}
    assert outputs == ({"", "fc"} if has_forward and layers is None else {"fc"})
