"""Formulas of ATB operations that move elements, count them or choose among them."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from llmdebug_nb.reference.atb_parameters import Inputs, Parameters
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.operators import CannotReplay

_BLOCK, _BYTE_BLOCK = 16, 32  # elements in a row of a fractal block; of one byte each


def gather(given: Parameters, inputs: Inputs) -> Inputs:
    """Elements of one axis by their numbers."""
    given.refuse("batchDims")
    x, indices = inputs[:2]
    axis = given.integer("axis") % max(x.dim(), 1)
    made = x.index_select(axis, indices.flatten().long())
    return [made.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])]


def split(given: Parameters, inputs: Inputs) -> Inputs:
    """Equal parts, or parts of these sizes."""
    axis = given.integer("splitDim")
    if given.found.get("splitSizes"):
        return list(torch.split(inputs[0], given.integers("splitSizes"), axis))
    return list(inputs[0].chunk(given.integer("splitNum", 2), axis))


def cut(given: Parameters, inputs: Inputs) -> Inputs:
    """A part of each axis; a size of -1 takes the rest."""
    x, offsets, sizes = inputs[0], given.integers("offsets"), given.integers("size")
    for axis, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        start += x.shape[axis] * (start < 0)
        x = x.narrow(axis, start, x.shape[axis] - start if size == -1 else size)
    return [x]


def set_value(given: Parameters, inputs: Inputs) -> Inputs:
    """The first input with the second in a part of it."""
    made, source = inputs[0].clone(), inputs[1]
    part = made
    starts, ends, steps = map(given.integers, ("starts", "ends", "strides"))
    for axis, (start, end, step) in enumerate(zip(starts, ends, steps, strict=True)):
        if step != 1:
            raise CannotReplay(f"no formula for a stride of {step} is known")
        part = part.narrow(axis, start, end - start)
    part.copy_(source)
    return [made]


def as_strided(given: Parameters, inputs: Inputs) -> Inputs:
    """Elements of the flat input, at places that sizes and strides give."""
    sizes, strides = given.integers("size"), given.integers("stride")
    places = torch.zeros((), dtype=torch.int64, device=inputs[0].device)
    places = places + int(given.first("offset"))
    for size, stride in zip(sizes, strides, strict=True):
        places = places.unsqueeze(-1) + stride * torch.arange(size, device=places.device)
    return [inputs[0].reshape(-1).take(places)]  # which checks that they are inside


def fill(given: Parameters, inputs: Inputs) -> Inputs:
    """One number, in all elements or where a mask is set."""
    value = given.first("value")
    if given.flag("withMask", True):
        return [inputs[0].masked_fill(inputs[1].bool(), value)]
    size = math.prod(given.integers("outDim"))
    if size != given.outputs[0].numel():
        raise CannotReplay("its outDim is not the recorded shape", GAP)
    return [torch.full(given.integers("outDim"), value, dtype=torch.float64)]


def onehot(given: Parameters, inputs: Inputs) -> Inputs:
    """A new axis with a 1 at the place that each whole number gives."""
    axis, depth = given.integer("axis"), given.integer("depth")
    found = inputs[0].unsqueeze(-1) == torch.arange(depth, device=inputs[0].device)
    return [found.long().movedim(-1, axis)]


def sort(given: Parameters, inputs: Inputs) -> Inputs:
    """The largest elements of the last axis in falling order, and their places."""
    found = inputs[0].topk(given.integers("num")[0], dim=-1)
    return [found.values, found.indices]


def index_add(given: Parameters, inputs: Inputs) -> Inputs:
    """The first input with scaled rows added to it."""
    given.choice("indexType", (1,))
    x, indices, updates, alpha = inputs[:4]
    axis = given.integer("axis")
    return [x.index_add(axis, indices.flatten().long(), updates * alpha.reshape(()))]


def transdata(given: Parameters, inputs: Inputs) -> Inputs:
    """Rows of blocks of 16 elements (32 of one byte), or back to plain rows."""
    x = inputs[0]
    if given.choice("transdataType", (1, 2)) == 1:
        rows, columns = given.integers("outCrops")
        plain = x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)
        return [plain[:, :rows, :columns]]
    x = x.unsqueeze(0) if x.dim() == 2 else x
    width = _BYTE_BLOCK if given.dtypes[0].itemsize == 1 else _BLOCK
    padded = F.pad(x, (0, -x.shape[2] % width, 0, -x.shape[1] % _BLOCK))
    blocks = padded.reshape(x.shape[0], padded.shape[1], -1, width)
    return [blocks.transpose(1, 2)]


# -- whose result depends on values ----------------------------------------------------------------


def nonzero(given: Parameters, inputs: Inputs) -> Inputs:
    """The places of what is not 0, one column each, filled up with 0; and how many there are."""
    x = inputs[0]
    found = x.nonzero().T
    return [F.pad(found, (0, x.numel() - found.shape[1])), torch.tensor([found.shape[1]])]


def pad(given: Parameters, inputs: Inputs) -> Inputs:
    """The last row of each sequence of a batch without padding."""
    rows, _, lengths = inputs[:3]
    return [rows.index_select(0, lengths.flatten().long().cumsum(0) - 1)]


def unpad(given: Parameters, inputs: Inputs) -> Inputs:
    """The tokens of a batch without padding, how far each sequence moves, and each token."""
    ids, moved, _, lengths = inputs[:4]
    counts = lengths.flatten().long().clamp(0, ids.shape[1])
    keeps = torch.arange(ids.shape[1]) < counts.unsqueeze(1)
    before = F.pad(moved.flatten().long()[:-1], (1, 0))
    each = before.unsqueeze(1).expand(ids.shape)
    left = ids.numel() - int(keeps.sum())
    filled = [F.pad(x[keeps], (0, left)).unsqueeze(0) for x in (ids, each)]
    return [filled[0], before.unsqueeze(1), filled[1]]


def gating(given: Parameters, inputs: Inputs) -> Inputs:
    """Tokens in the order of their experts, the experts' running counts, and their old places."""
    given.refuse("deviceExpert")
    chosen, places = (x.flatten().long() for x in inputs[:2])
    experts, each = given.integer("cumSumNum"), given.integer("topkExpertNum", 1)
    if len(given.outputs) < 3 or experts != given.outputs[1].numel() or each < 1:
        raise CannotReplay("its parameters do not fit what was recorded", GAP)
    order = chosen.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64)
    counts = counts.index_add(0, chosen, torch.ones_like(chosen))
    old = places[order]
    return [old // each, counts.cumsum(0), old]


def sampling(given: Parameters, inputs: Inputs) -> Inputs:
    """The token that was drawn if it may be drawn, else the likeliest; and its probability.

    Which candidate is drawn depends on random numbers of the device. That it is one of them, and
    that its own probability is reported, does not.
    """
    kind = given.choice("topkToppSamplingType", (0, 1, 2), -1)
    probabilities, *limits = inputs
    ranked, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    most = given.integer("topk", 100) - 1 if kind == 0 else limits.pop(0).long().reshape(-1, 1)
    share = limits[0].reshape(-1, 1)
    drawn = given.outputs[0].reshape(-1, 1).long()
    rank = (tokens == drawn).long().argmax(-1, keepdim=True)
    own = ranked.gather(-1, rank)
    # equal ones are in any order: the first of them counts; a sum rounds at most one step up
    rank = (ranked > own).sum(-1, keepdim=True)
    before = F.pad(ranked.cumsum(-1), (1, 0)).gather(-1, rank)
    step = torch.finfo(given.dtypes[0]).eps
    there = (tokens == drawn).any(-1, keepdim=True)
    fits = there & (rank <= most) & ((before < share * (1 + step)) | (rank == 0))
    chosen = torch.where(fits, drawn, tokens[:, :1])
    return [chosen, probabilities.gather(-1, chosen)]
