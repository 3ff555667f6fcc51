"""Tokens that only one of two batches has, and layers known by their leaves with parameters."""

from __future__ import annotations

import pytest
import torch

from llmdebug_nb.align import tree
from llmdebug_nb.align.batch_layout import BatchMap, TokenSpan
from llmdebug_nb.align.modules import ModuleTree
from llmdebug_nb.core.records import Node

PADDED = BatchMap((1, 5), (2, 8), (TokenSpan(0, 0, 1, 3, 5),))  # golden's is mine's second request


def places(shape, *at):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)[at].flatten()


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ((2, 8, 16), (1, slice(3, 8))),
        ((2, 4, 8, 8), (1, slice(None), slice(3, 8), slice(3, 8))),  # scores: query and key
        ((4, 2, 8), (slice(None), 1, slice(3, 8))),
    ],
)
def test_all_tokens_that_both_batches_have_are_all_of_a_tensor(shape, at):
    assert PADDED.has_all(1, shape, places(shape, *at))
    assert not PADDED.has_all(1, shape, places(shape, *at)[1:])


def test_a_part_of_the_channels_or_other_tokens_are_not_all():
    assert not PADDED.has_all(1, (2, 8, 16), places((2, 8, 16), 1, slice(3, 8), slice(0, 4)))
    assert not PADDED.has_all(1, (2, 8, 16), places((2, 8, 16), 1, slice(0, 5)))
    assert not PADDED.has_all(1, (2, 8, 16), places((2, 8, 16), 0, slice(3, 8)))


def test_a_cache_has_the_tokens_of_all_steps_so_far():
    cache = (2, 10, 4)
    assert PADDED.continued(2).has_all(1, cache, places(cache, 1, slice(3, 10)))
    assert not PADDED.has_all(1, cache, places(cache, 1, slice(3, 10)))


# -- leaves without parameters ---------------------------------------------------------------------


def modules(paths):
    """Return the tree of modules: path -> (class, shapes of parameters)."""
    numbers = {path: n for n, path in enumerate(paths)}
    nodes = [
        Node(path, path.rpartition(".")[2], kind, numbers.get(path.rpartition(".")[0], -1), shapes)
        for path, (kind, shapes) in paths.items()
    ]
    return ModuleTree(nodes, [])


def block(path, names):
    return {path: ("Block", {})} | {f"{path}.{name}": what for name, what in names.items()}


def test_leaves_without_parameters_do_not_pair_layers_with_their_neighbours():
    """Mine has its dropouts before the linear layers, golden behind them."""
    wide, drop = ("Linear", {"weight": [16, 16], "bias": [16]}), ("Dropout", {})
    golden = {"": ("M", {}), "h": ("ModuleList", {})}
    mine = {"": ("M", {}), "stack": ("ModuleList", {})}
    for n in range(3):
        golden |= block(f"h.{n}", {"one": wide, "two": wide, "off": drop})
        mine |= block(f"stack.{n}", {"rest": drop, "first": wide, "second": wide})
    found = tree.partners(modules(golden), modules(mine), {})
    assert [found[f"h.{n}"][0] for n in range(3)] == [(f"stack.{n}",) for n in range(3)]
    assert [found.get(f"h.{n}.off", ((f"stack.{n}.rest",),))[0][0] for n in range(3)] == [
        f"stack.{n}.rest" for n in range(3)
    ]


def test_modules_that_only_watch_values_do_not_hide_the_one_that_computes():
    """Mine hangs modules without parameters into its layers, and joins linear layers in one."""
    square, watch = {"weight": [16, 16]}, ("Watch", {})
    golden = {"": ("M", {}), "h": ("ModuleList", {})}
    mine = {"": ("M", {}), "blocks": ("ModuleList", {})}
    for n in range(3):
        golden |= block(f"h.{n}", {"norm": ("Norm", {"weight": [16]}), "attn": ("A", {})})
        golden |= {f"h.{n}.attn.{x}": ("Linear", square) for x in ("q", "k", "v", "o")}
        golden |= {f"h.{n}.mlp": ("B", {}), f"h.{n}.mlp.up": ("Linear", {"weight": [40, 16]})}
        golden |= {f"h.{n}.mlp.down": ("Linear", {"weight": [16, 40]})}
        mine |= block(f"blocks.{n}", {"norm": ("Norm", {"w": [16]}), "seen": watch})
        mine |= {f"blocks.{n}.norm.scale": watch}
        mine |= {f"blocks.{n}.attn": ("C", {"W": [4, 16, 4], "O": [4, 4, 16], "mask": [9, 9]})}
        mine |= {f"blocks.{n}.attn.hook": watch}
        mine |= {f"blocks.{n}.mlp": ("D", {"I": [16, 40], "O": [40, 16]})}
        mine |= {f"blocks.{n}.mlp.hook": watch}
    found = tree.partners(modules(golden), modules(mine), {})
    for n in range(3):
        for name in ("norm", "attn", "mlp"):
            assert found[f"h.{n}.{name}"][0] == (f"blocks.{n}.{name}",)
