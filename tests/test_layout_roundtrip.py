"""A run of any modules, dtypes and shapes, in every layout: written and read again, or counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_files import read
from llmdebug_nb.app.convert import WRITERS
from llmdebug_nb.core.errors import StoreError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import Node, Record, Site
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import Contents, writing
from test_layout_torchair import tensors

NAMES = st.one_of(
    st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    st.integers(0, 12).map(str),
    st.text(st.characters(exclude_characters="./"), min_size=1, max_size=6),
)
SLOTS = st.one_of(
    st.sampled_from(["0", "1", "2.0", "0.1.2", "kwargs.mask", "logits", "hidden.3"]),
    st.lists(NAMES, min_size=1, max_size=3).map(".".join),
)
OPERATORS = ["Functional.linear", "Tensor.add", "Aten.mm", "Aten.add.Tensor", "mm"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Node], list[tuple[Record, torch.Tensor]]]:
    """Return a module tree, and records of its modules and operators, with their values."""
    paths = [""]
    for name in draw(st.lists(NAMES, max_size=5)):
        above = draw(st.sampled_from(paths))
        path = f"{above}.{name}" if above else name
        if path not in paths:
            paths.append(path)
    types = {path: draw(st.sampled_from(["Linear", "Block", "LlamaModel", ""])) for path in paths}
    nodes = [
        Node(path, path.rpartition(".")[2], types[path],
             paths.index(path.rpartition(".")[0]) if path else -1)
        for path in paths
    ]  # fmt: skip
    site = st.builds(
        Site,
        path=st.tuples(st.sampled_from(paths), st.sampled_from(["", *OPERATORS])).map(
            lambda pair: f"{pair[0]}/{pair[1]}" if pair[1] else pair[0]
        ),
        step=st.integers(0, 3), call=st.integers(0, 1), slot=SLOTS, rank=st.integers(0, 1),
        phase=st.sampled_from(["forward", "forward", "backward"]),
        role=st.sampled_from(["input", "output", "output", "weight"]),
        generation=st.sampled_from([0, 0, 0, 1]),
    )  # fmt: skip
    found = draw(st.lists(st.tuples(site, tensors), min_size=1, max_size=8,
                          unique_by=lambda pair: pair[0]))  # fmt: skip
    records = [
        Record(
            number, at, number,
            at.path.partition("/")[2] if is_operator(at.path) else types[at.path],
            summarize(tensor), payload=number,
        )
        for number, (at, tensor) in enumerate(found)
    ]  # fmt: skip
    return nodes, [(record, tensor) for record, (_, tensor) in zip(records, found, strict=True)]


def exported(
    layout: str, nodes: list[Node], made: list[tuple[Record, torch.Tensor]], folder: Path
) -> tuple[writing.Written, Contents] | None:
    """Write a run and read it again; None if the layout has no place for any of it."""
    records = [record for record, _ in made]
    names: Callable[[Record], str | None] = lambda record: (  # noqa: E731
        module_of(record.site.path).replace(".", "_") or "root"
        if is_operator(record.site.path)
        else None
    )
    dump = writing.Dump(records, nodes, lambda record: made[record.id][1], names, begun=1.0)
    try:
        written = writing.write(WRITERS[layout], dump, folder)
    except StoreError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "nothing was written to" in said
        return None
    reader = layouts.detect(folder)
    assert reader is not None
    return written, read(reader, folder)


# what a layout keeps of a site; msit and ATB name processes, which are numbered as they come
KEEPS: dict[str, Callable[[Site], Any]] = {
    "msit": lambda s: (s.step if s.role != "weight" else 0, s.role, s.slot),
    "msprobe": lambda s: (s.step, s.rank, s.phase, s.role, s.slot),
    "atb": lambda s: (s.step, s.role), "atb-msprobe": lambda s: (s.step, s.role),
    "fx": lambda s: (s.step, s.rank, s.role), "fx-old": lambda s: (s.step, s.role),
    "ge": lambda s: (s.step, s.rank, s.role), "npy": lambda s: (),
}  # fmt: skip


def _held(layout: str, tensor: torch.Tensor) -> tuple[str, str, bytes]:
    """Return a tensor's dtype, shape and bytes as a layout keeps them."""
    if layout.startswith("fx") and not hasattr(np, str(tensor.dtype)[6:].replace("bool", "bool_")):
        tensor = tensor.float()
    return str(tensor.dtype), str(tuple(tensor.shape)), to_bytes(tensor).tobytes()


@pytest.mark.parametrize("layout", list(WRITERS))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(run=runs())
def test_what_is_written_is_read_again_and_the_rest_is_counted(
    tmp_path_factory: pytest.TempPathFactory, layout: str, run: Any
) -> None:
    nodes, made = run
    folder = tmp_path_factory.mktemp("x") / "out"
    found = exported(layout, nodes, made, folder)
    assert [path for path in folder.parent.iterdir() if path != folder] == []
    if found is None:
        return
    written, contents = found
    assert written.tensors + written.described + sum(written.left_out.values()) == len(made)
    assert not [record.lost for record in contents.records if record.lost]
    assert len(contents.records) == written.tensors
    keeps = KEEPS[layout]
    there = Counter((keeps(r.site), _held(layout, contents.load(r))) for r in contents.records)
    whole = Counter((keeps(r.site), _held(layout, tensor)) for r, tensor in made)
    assert there <= whole
