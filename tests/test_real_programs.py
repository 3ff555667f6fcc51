"""Programs as people write them: training loops, adapters, offloading, several models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmdebug_nb as ld
from models import generate, hooks_left, llama, prompt

MODES = ("module", "module+api+aten")


class Lora(nn.Module):
    """An adapter around a linear layer, as PEFT wraps them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 0.5 * self.lora_B(self.lora_A(x))


def with_adapters():
    model = llama().train()
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    return model


def train(model, steps=3, accumulate=2):
    """Train as a Trainer does, with accumulation and clipping; return all state it leaves."""
    torch.manual_seed(3)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    losses = []
    for number in range(steps * accumulate):
        ids = prompt(batch=2, seed=number)
        loss = model(input_ids=ids, labels=ids).loss / accumulate
        loss.backward()
        losses.append(loss.detach().clone())
        if number % accumulate == accumulate - 1:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    state = [value for slot in optimizer.state.values() for value in slot.values()]
    return [*losses, *(p.detach().clone() for p in trained), *state, torch.get_rng_state()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, with_adapters])
def test_a_recorded_training_loop_ends_with_the_same_weights(make, mode):
    plain = train(make())
    model = make()
    with ld.dump(model, name="r", mode=mode, tokens="1-4") as run:
        recorded = train(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert hooks_left(model) == 0
    assert run.info()["complete"]
    table = run.to_pandas()
    assert set(table.step) == {1, 2, 3, 4}
    if mode == "module":
        grads = table[table.role == "grad"]
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {f"{r.path}.{r.slot}" for r in grads.itertuples()} == trained
        assert (grads.groupby(["step", "path", "slot"]).size() == 1).all()


def test_adapters_have_places_of_their_own():
    model = with_adapters()
    ids = prompt()
    with ld.dump(model, name="r", mode="module+api") as run:
        model(input_ids=ids, labels=ids).loss.backward()
    paths = set(run.to_pandas().path)
    place = "model.layers.1.self_attn.q_proj"
    assert {
        f"{place}.base_layer",
        f"{place}.lora_A/Functional.linear",
        f"{place}/Tensor.mul",
    } <= paths


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_weights_are_recorded_in_their_modules(mode):
    from accelerate import cpu_offload

    model = llama()
    expected = generate(model, new=3)
    cpu_offload(model, torch.device("cpu"), offload_buffers=False)
    with ld.dump(model, name="r", mode=mode, weights=True, tokens="0") as run:
        found = generate(model, new=3)
    assert torch.equal(found, expected)
    assert run.info()["complete"]
    weight = run.tensor("model.layers.0.mlp.up_proj", role="weight", slot="weight")
    assert torch.equal(weight, llama().model.layers[0].mlp.up_proj.weight)
    if mode != "module":
        used = run.tensor("model.layers.0.mlp.up_proj/Functional.linear", role="input", slot="1")
        assert torch.equal(used, weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["beams", "assisted"])
def test_generation_with_beams_and_with_an_assistant_is_unchanged(how, mode):
    model, assistant = llama(), llama(1)
    options = {"num_beams": 3} if how == "beams" else {"assistant_model": assistant}

    def run():
        torch.manual_seed(0)
        return generate(model, new=5, **options)

    expected = run()
    with ld.dump(model, name="r", mode=mode, tokens="0-2") as recorded:
        assert torch.equal(run(), expected)
    assert set(recorded.to_pandas().step) == {0, 1, 2}
    assert hooks_left(model) == 0


def test_two_models_in_one_process_are_recorded_apart_or_together():
    teacher, student = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3)

    def distil():
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(student(x), target).backward()

    with (
        ld.dump(teacher, name="t", mode="module+aten") as one,
        ld.dump(student, name="s", mode="module+aten") as other,
    ):
        distil()
    assert list(one.operators().query("phase == 'forward'").path) == [
        "/Aten.addmm",
        "/Aten.mse_loss",
        "/Aten.ones_like",
    ]
    assert "0/Aten.addmm" in set(other.to_pandas().path)
    with ld.dump([teacher, student], name="both") as both:
        distil()
    assert torch.equal(both.tensor(""), one.tensor(""))
    assert torch.equal(both.tensor("Sequential~1.0"), other.tensor("0"))
    assert len(both.to_pandas().query("role == 'grad'")) == 2


def test_a_module_given_twice_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ld.errors.OptionError, match="the same Linear is given twice"):
        ld.dump([model, model])


def test_collectives_are_recorded_with_the_prefix_of_their_namespace(tmp_path):
    class Reduces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            x = self.inner(x)
            torch.distributed.all_reduce(x)
            return x

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        original = torch.distributed.all_reduce
        model = Reduces()
        with torch.no_grad(), ld.dump(model, name="r", mode="api") as run:
            out = model(torch.ones(1, 2))
        assert torch.distributed.all_reduce is original
        assert torch.equal(run.tensor("/Distributed.all_reduce"), out)
    finally:
        torch.distributed.destroy_process_group()
