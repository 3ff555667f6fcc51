"""Values are read with what lies behind them, and are those of the file all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmdebug_nb.core import constants
from llmdebug_nb.store import own_file, payload
from llmdebug_nb.store.payload_files import name_of

CONTENT = bytes(range(251)) * 7
PLACES = st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("rank0")
    (place / name_of(0)).write_bytes(CONTENT[:1000])
    (place / name_of(1000)).write_bytes(CONTENT[1000:])
    return place


@given(places=st.lists(PLACES, max_size=20), ahead=st.sampled_from([1, 16, 100, 1 << 16]))
def test_any_places_in_any_order_hold_what_the_files_hold(folder, places, ahead):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "READ_AHEAD", ahead)
        pieces = payload.pieces(folder)
        for at, count in places:
            part = CONTENT[at : at + count]
            assert payload.read(pieces, at, len(part)) == part


def test_tensors_side_by_side_are_read_at_once(folder, monkeypatch):
    opened = []
    open_file = own_file.open_file
    monkeypatch.setattr(own_file, "open_file", lambda file: opened.append(file) or open_file(file))
    pieces = payload.pieces(folder)
    for at in range(0, 1000, 40):
        payload.read(pieces, at, 40)
    assert len(opened) == 1


def test_a_file_that_lost_its_end_is_cut_short(tmp_path):
    (tmp_path / name_of(0)).write_bytes(CONTENT)
    pieces = payload.pieces(tmp_path)
    (tmp_path / name_of(0)).write_bytes(CONTENT[:100])
    assert payload.read(pieces, 60, 40) == CONTENT[60:100]
    with pytest.raises(OSError, match="ends early"):
        payload.read(pieces, 60, 41)


def test_what_was_read_is_the_readers_own(folder):
    pieces = payload.pieces(folder)
    payload.read(pieces, 0, 10)[:] = bytes(10)
    assert payload.read(pieces, 0, 10) == CONTENT[:10]
