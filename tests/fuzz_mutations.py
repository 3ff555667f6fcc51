"""Seeded mutations that know the structure of what they change: JSON, tables, frames, bytes."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmdebug_nb.core.columns import TABLES
from llmdebug_nb.store import format as fmt

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 70, 0.5,
    -0.0, 1e308, float("nan"), float("inf"), "", "0", "-1", "x", "a.b.c", ".", "..", "../../x", "/",
    "x" * 5000, "a." * 3000, "\0", "\ud800", "\x1b[2J", "<script>", "é", "[", "[]", "{}", "null",
    "[[1]]", "[1, 2]", "[-1]", "[1e9]", "[10000000000]", "float32", "int64", "complex64", "object",
    "slice[0]", "slice[:]", "minmax", "quantile[5]", "quantile[99999999999]", "forward", "backward",
    "input", "output", "weight", "grad", "0_1", "3_1.4", [], {}, [None], [[]], {"a": 1}, [1] * 300,
)  # fmt: skip
SCHEMA = (
    "CREATE VIEW v AS SELECT 1",
    "CREATE TABLE other(x)",
    "CREATE INDEX i ON records(id + 1)",
    "DROP TABLE {table}",
    "DROP TABLE {table}; CREATE VIEW {table} AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL"
    " SELECT x + 1 FROM n) SELECT * FROM n",
    "ALTER TABLE {table} ADD COLUMN more",
    "ALTER TABLE {table} RENAME TO gone",
    "DROP TABLE {table}; CREATE TABLE {table}({columns})",
    "PRAGMA journal_mode=WAL",
    "PRAGMA encoding='UTF-16'",
    "PRAGMA user_version=9",
)


def document(rng: random.Random, value: Any) -> Any:
    """Return JSON-like data with one to three of its nodes changed."""
    holder = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(holder))
        parent, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.6:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.7 and parent is not holder:
            del parent[key]
        elif kind < 0.8:
            other, at = rng.choice(places)
            parent[key] = copy.deepcopy(other[at])
        elif kind < 0.85:
            parent[key] = _deep(parent[key], rng.choice((2, 50, 300)))
        elif isinstance(parent, dict):
            parent[str(rng.choice(VALUES))] = parent[key]
        elif parent is not holder:
            parent.insert(key, copy.deepcopy(rng.choice(VALUES)))
    return holder[0]


def _places(node: Any) -> Any:
    """Yield each container with each of its keys."""
    open_ = [node]
    while open_:
        at = open_.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at))
        for key in keys:
            yield at, key
            if isinstance(at[key], (dict, list)):
                open_.append(at[key])


def _deep(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def as_json(rng: random.Random, value: Any) -> str:
    """Return mutated data as JSON, sometimes with wrong bytes or numbers in it."""
    try:
        text = json.dumps(document(rng, value))
    except RecursionError:
        text = "[" * 3000
    return text_of(rng, text) if rng.random() < 0.2 else text


def text_of(rng: random.Random, text: str) -> str:
    """Return a text with a piece cut out, doubled or replaced."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice((0, 1, 2, 8, 60)))
    piece = rng.choice((
        "", text[start:end] * 2, "NaN", "1e999", "\0", "\n", "- ", ": ", "{", "[", "*a", "!!x",
        '"', "'", "#", "\ud800", "9" * 5000, str(rng.choice(VALUES)),
    ))  # fmt: skip
    return text[:start] + piece + text[end:]


def data(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with some of them changed, cut off, repeated or inserted."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            number = rng.choice((0, 1, 7, 1 << 20, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63))
            out[at : at + 8] = struct.pack("<Q", number)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = out[at : at + rng.choice((1, 8, 64))]
        else:
            out[at : at + rng.randrange(1, 16)] = b""
    return bytes(out)


def _frames_of(content: bytes) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield place, length and header of each frame of a sound payload file."""
    at = 0
    while at + 8 <= len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        header = json.loads(content[at + 8 : at + 8 + size])
        yield at, size, header
        at += 8 + size + header.get("tensor", {"data_offsets": [0, 0]})["data_offsets"][1]
        at += -at % fmt.ALIGN


def frames(rng: random.Random, content: bytes) -> bytes:
    """Return a payload file with the header of one of its frames changed."""
    try:
        starts = list(_frames_of(content))
    except (ValueError, LookupError, AttributeError, TypeError):  # it was changed before
        return data(rng, content)
    if not starts or rng.random() < 0.2:
        return data(rng, content)
    at, size, header = rng.choice(starts)
    row = document(rng, json.loads(header["__metadata__"]["record"]))
    if rng.random() < 0.3:
        header = document(rng, header)
    elif "__metadata__" in header:
        header["__metadata__"]["record"] = _dumped(row)
    text = _dumped(header).encode()
    text += b" " * (-len(text) % fmt.ALIGN)
    return content[:at] + struct.pack("<Q", len(text)) + text + content[at + 8 + size :]


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 3000


def index(rng: random.Random, file: Path) -> None:
    """Change rows or the schema of an index, or its bytes."""
    if rng.random() < 0.08:
        file.write_bytes(data(rng, file.read_bytes()))
        return
    with contextlib.closing(sqlite3.connect(file)) as db, contextlib.suppress(sqlite3.Error):
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change(rng, db)
        db.commit()


def _change(rng: random.Random, db: sqlite3.Connection) -> None:
    weights = [8 if table.name in ("records", "nodes", "operators") else 1 for table in TABLES]
    (table,) = rng.choices(TABLES, weights)
    if rng.random() < 0.06:
        script = rng.choice(SCHEMA).format(table=table.name, columns=", ".join(table.names))
        db.executescript(script)
        return
    column, other = rng.choice(table.names), rng.choice(table.names)
    some = rng.choice(("1", "1", f"rowid % {rng.randrange(1, 9)} = 0", "rowid = 1", "rowid < 3"))
    kind = rng.random()
    if kind < 0.6:
        value = rng.choice(VALUES)
        if isinstance(value, (list, dict)):
            value = json.dumps(value)
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            value = float(value)
        elif isinstance(value, str) and rng.random() < 0.2:
            value = value.encode(errors="replace")
        with contextlib.suppress(UnicodeEncodeError):
            db.execute(f"UPDATE {table.name} SET {column} = ? WHERE {some}", (value,))
    elif kind < 0.7:
        db.execute(f"UPDATE {table.name} SET {column} = {other} WHERE {some}")
    elif kind < 0.8:
        amount = rng.choice((1, -1, 1 << 40))
        db.execute(f"UPDATE {table.name} SET {column} = {column} + {amount} WHERE {some}")
    elif kind < 0.88:
        db.execute(f"DELETE FROM {table.name} WHERE {some}")
    elif kind < 0.94:
        rest = ", ".join(f'"{name}"' for name in table.names[1:])
        db.execute(f"INSERT INTO {table.name}({rest}) SELECT {rest} FROM {table.name} WHERE {some}")
    else:
        found = db.execute(f"SELECT rowid, {column} FROM {table.name} LIMIT 40").fetchall()
        texts = [(row, text) for row, text in found if isinstance(text, str) and text[:1] in "[{"]
        if texts:
            row, text = rng.choice(texts)
            with contextlib.suppress(ValueError, UnicodeEncodeError):
                changed = as_json(rng, json.loads(text))
                db.execute(f"UPDATE {table.name} SET {column} = ? WHERE rowid = ?", (changed, row))


def folder(rng: random.Random, root: Path) -> None:
    """Change a file of a dump by its kind, or rename, remove or swap files."""
    files = sorted(file for file in root.rglob("*") if file.is_file())
    file = rng.choice(files)
    kind = rng.random()
    if kind < 0.06:
        file.unlink()
    elif kind < 0.12:
        name = rng.choice(
            ("x", "0", "-1", "9" * 40, "a" * 200, "é", "x\n", "input_0.pth", "dump.json")
        )
        with contextlib.suppress(OSError):
            file.rename(file.with_name(name + file.suffix))
    elif kind < 0.18:
        file.write_bytes(rng.choice(files).read_bytes() if file.exists() else b"")
    elif file.suffix == ".json":
        try:
            text = as_json(rng, json.loads(file.read_text("utf-8")))
        except ValueError:
            text = "{"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif file.suffix in (".csv", ".yaml", ".txt"):
        file.write_bytes(text_of(rng, file.read_text("utf-8")).encode("utf-8", "surrogatepass"))
    elif file.name == fmt.INDEX:
        index(rng, file)
    elif file.name == fmt.PAYLOAD:
        file.write_bytes(frames(rng, file.read_bytes()))
    else:
        file.write_bytes(data(rng, file.read_bytes()))
