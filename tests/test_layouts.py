"""Rules for every foreign layout: links, pipes, names and shapes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from layout_files import EXAMPLE, X, at, read, save, torch_bytes, write
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import files, plain


@pytest.mark.parametrize(
    ("base", "file"),
    [
        ("", "x.pt"),
        ("cpu_1", "0/root.fc/output.pth"),
        ("0_1", "0/0_Add/after/outtensor0.bin"),
    ],
)
def test_link_that_leads_out_of_the_folder_is_lost_and_one_inside_is_followed(
    tmp_path: Path,
    base: str,
    file: str,
) -> None:
    data = EXAMPLE if file.endswith(".bin") else torch_bytes(X)
    secret = write(tmp_path / "secret", data)
    folder = tmp_path / "dump" / base
    good = write(
        folder / file.replace("fc", "good").replace("Add", "Good").replace("x.", "good."), data
    )
    inside = folder / file.replace("fc", "linked").replace("Add", "Linked").replace("x.", "linked.")
    out = folder / file
    for link, target in ((inside, good), (out, secret)):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    layout = layouts.detect(folder)
    assert layout is not None
    contents = read(layout, folder)
    assert len(contents.records) == 3
    (lost,) = [record.lost for record in contents.records if record.lost]
    assert f"{file} is a link that leads out of the folder" in lost
    for record in contents.records:
        assert record.lost or torch.equal(contents.load(record), X)


def test_linked_folder_that_leads_out_is_not_entered_and_not_silent(tmp_path: Path) -> None:
    save(X, tmp_path / "elsewhere/secret.pt")
    save(X, tmp_path / "dump/good.pt")
    (tmp_path / "dump/away").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dump/round").symlink_to(tmp_path / "dump")
    contents = read(plain, tmp_path / "dump")
    assert {r.site.path: r.lost is None for r in contents.records} == {"good": True, "away": False}


def test_file_replaced_by_a_link_out_after_opening_is_refused_on_load(tmp_path: Path) -> None:
    secret = save(X, tmp_path / "secret.pt")
    file = save(X, tmp_path / "dump/x.pt")
    contents = read(plain, tmp_path / "dump")
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(CorruptDumpError, match="leads out"):
        contents.load(contents.records[0])


def test_a_file_that_the_user_names_may_be_a_link_to_anywhere(tmp_path: Path) -> None:
    blob = save(X, tmp_path / "blobs/0123")
    link = tmp_path / "snapshots/x.pt"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert layouts.detect(link) is plain
    contents = read(plain, link)
    (record,) = contents.records
    assert record.site.path == "x"
    assert torch.equal(contents.load(record), X)
    with pytest.raises(CorruptDumpError, match="leads out"):  # a dump may come from anyone
        read(plain, link.parent)
    link.unlink()
    link.symlink_to(save(X, tmp_path / "blobs/4567"))
    with pytest.raises(CorruptDumpError, match="leads out"):  # it is another file by now
        contents.load(record)


def test_a_link_counts_by_its_target_if_only_that_has_an_ending(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(save(X, tmp_path / "x.pt"))
    assert [record.site.path for record in read(plain, tmp_path / "latest").records] == ["x"]


def test_pipe_named_like_a_tensor_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    save(X, tmp_path / "good.pt")
    assert "not a regular file" in (at(read(plain, tmp_path), "x").lost or "")


def test_every_layout_has_a_name_of_its_own_and_none_claims_an_empty_folder(tmp_path: Path) -> None:
    assert [layout.NAME for layout in layouts.layouts()] == [
        "msprobe",
        "msit-torch",
        "atb",
        "fx",
        "ge",
        "files",
    ]
    assert layouts.detect(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("torch.Size([2, 3])", (2, 3)),
        ("(4,)", (4,)),
        ("()", ()),
        ("", ()),
        ("2x3", (2, 3)),
        ("2,3", (2, 3)),
        ([2, 3], (2, 3)),
    ],
)
def test_shape_is_read_in_every_notation(text: Any, shape: tuple[int, ...]) -> None:
    assert files.sizes(text) == shape


@pytest.mark.parametrize(
    "text", ["2,,3", "-1", "2.5", "x", "(2", "1e3", ["2"], {"a": 1}, None, str(1 << 64)]
)
def test_shape_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(CorruptDumpError, match="not a shape"):
        files.sizes(text)
