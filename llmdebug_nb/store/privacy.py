"""What a dump holds that tells about a text, a program or a person."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.masking import MASK
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import Frame, Record
from llmdebug_nb.store import catalog, own_file
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.checked import shape_of
from llmdebug_nb.store.payload import UPLOAD
from llmdebug_nb.store.payload_files import start_of
from llmdebug_nb.store.queries import Index
from llmdebug_nb.store.rows import texts_of, views_of
from llmdebug_nb.store.signals import SIGNALS
from llmdebug_nb.store.tabular import Tabular
from llmdebug_nb.store.views import VIEWS

if TYPE_CHECKING:
    import pandas

_WIDTH = 60  # characters of an example
_IDS = 6  # token ids in the example
_SHORT = 3  # characters: a shorter name is a part of many words
_CHUNK = 1 << 24  # bytes that are searched at once
_INTEGER = "dtype GLOB 'int*' OR dtype GLOB 'uint*'"
_TEXTS = """value IS NOT NULL AND role != 'weight' AND type NOT IN
 ('bool', 'int', 'float', 'complex', 'dtype', 'device')"""


@dataclass(frozen=True, slots=True)
class Holding:
    """One kind of what a dump holds. ``tells``: to whoever gets it. ``bytes``: 0 if not counted."""

    what: str
    count: int
    bytes: int
    example: str
    tells: str


class Privacy(Tabular):
    """What a dump holds that tells about a text, a program or a person; made by `Run.privacy`.

    ``holdings``: each kind, those that the dump has none of included.
    """

    def __init__(self, name: str, holdings: tuple[Holding, ...]) -> None:
        self.name, self.holdings = name, holdings

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each kind: what, count, bytes, example, tells."""
        import pandas

        return pandas.DataFrame([asdict(each) for each in self.holdings])

    def __repr__(self) -> str:
        held = sum(each.count > 0 for each in self.holdings)
        return f"Privacy of {self.name!r}: {held} of {len(self.holdings)} kinds are there"

    def __str__(self) -> str:
        width = max(len(each.what) for each in self.holdings)
        lines = [f"What {printable(self.name)} holds:"]
        for each in self.holdings:
            size = f", {each.bytes:,} bytes" if each.bytes else ""
            count = f"{each.count:,}{size}" if each.count else "none"
            lines.append(f"  {each.what:{width}}  {count}")
            if each.count:
                lines[-1] += f", such as {printable(each.example)}" if each.example else ""
                lines.append(f"  {'':{width}}  {each.tells}")
        return "\n".join(lines)


def privacy(index: Index, label: str) -> Privacy:
    """Return what a run holds; ``label``: its name. Raises CorruptDumpError."""
    parts = (_tensors, _program, _texts, _surroundings)
    return Privacy(label, tuple(each for part in parts for each in part(index)))


def _tensors(index: Index) -> Iterator[Holding]:
    kept, _ = index.count_kept_and_lost()
    first = next(index.records(None, 1, role="output"), None)
    yield Holding(
        "values of tensors", kept, index.source.nbytes if kept else 0,
        _site(first) if kept else "",
        "what the model computed; its text can be read from embeddings and logits",
    )  # fmt: skip
    ids = index.query(
        VIEWS["rows"].row("id", "dtype", "shape"),
        f"""SELECT id, dtype, shape FROM rows WHERE payload IS NOT NULL AND role != 'weight'
 AND ({_INTEGER}) GROUP BY payload
 ORDER BY coalesce(argument, '') || slot NOT LIKE '%ids%', id""",
    )
    nbytes = sum(_nbytes(dtype, shape) for _, dtype, shape in ids)
    yield Holding(
        "of them, whole numbers", len(ids), nbytes, _numbers(index, ids[0][0]) if ids else "",
        "token ids are among them: with the tokenizer, they are the prompt and the answer",
    )  # fmt: skip
    ((weights, path),) = index.query(
        tuple[int, str | None],
        """SELECT count(payload), min(path) FROM rows
 WHERE (role = 'weight' OR argument IN ('weight', 'bias')) AND payload IS NOT NULL""",
    )
    yield Holding("of them, weights", weights, 0, path or "", "the model itself")
    ((figures, example),) = index.query(
        tuple[int, str | None],
        "SELECT count(*), min(fingerprint) FROM rows WHERE min IS NOT NULL OR fingerprint NOT NULL",
    )
    yield Holding(
        "statistics and fingerprints", figures, 0, example or "",
        "no text; but who has the model and guesses the text gets the same figures",
    )  # fmt: skip


def _program(index: Index) -> Iterator[Holding]:
    stacks = index.query(tuple[str, str | None], "SELECT frames, code FROM all_sources")
    lines = {line for _, code in stacks if code for line in texts_of(code, index.path, "code")}
    yield _of_texts("lines of code", lines - {""}, "what the program does, line by line")
    functions = index.query(tuple[str], "SELECT DISTINCT text FROM all_functions")
    texts = {text for (text,) in functions}
    yield _of_texts("text of functions", texts, "the code of the model, as far as it ran")
    kernels = index.query(tuple[str], "SELECT source FROM all_kernels WHERE source != ''")
    codes = {text for (text,) in kernels}
    yield _of_texts("code of kernels", codes, "what the compiler made of it")
    chains = "SELECT DISTINCT views FROM rows WHERE views IS NOT NULL"
    views = [views_of(index.path, chain) for (chain,) in index.query(tuple[str], chains)]
    places = [text for frames, _ in stacks for text in texts_of(frames, index.path, "a call stack")]
    places += [view.source for chain in views for view in chain]
    frames = [node.source for node in index.source.nodes()] + [
        Frame.read(place) for place in places
    ]
    files = {frame.file for frame in frames if frame is not None}
    yield _of_texts("names of files", files, "where the program lies, in its project or the home")
    paths = {path for (path,) in index.query(tuple[str], "SELECT DISTINCT path FROM rows")}
    yield _of_texts("names of modules and operators", paths - {""}, "the architecture of the model")


def _texts(index: Index) -> Iterator[Holding]:
    found = index.query(tuple[str], f"SELECT value FROM scalar_rows WHERE {_TEXTS}")
    texts = [text for (text,) in found]
    shown = sorted(texts, key=lambda text: (text[:1] in "([", MASK in text))
    yield Holding(
        "texts among arguments and attributes", len(texts), sum(map(_size, texts)),
        _cut(shown[0]) if shown else "", "whatever the program passes as a text",
    )  # fmt: skip
    yield Holding(
        "masked secrets", _masked(index), 0, MASK,
        "that something was there; not what, nor how long, nor whether two are equal",
    )  # fmt: skip


def _masked(index: Index) -> int:
    return sum(process.get("masked") or 0 for process in index.source.processes)


def _surroundings(index: Index) -> Iterator[Holding]:
    meta = index.source.meta
    environment = [f"{name} {value}" for name, value in (meta.get("environment") or {}).items()]
    yield _of_texts("versions", environment, "which software, and which kind of device")
    options = [f"{k}={v}" for k, v in (meta.get("options") or {}).items() if isinstance(v, str)]
    yield _of_texts("options that are texts", options, "what was recorded")
    setup = {**_mapping(meta.get("setup")), **_mapping(meta.get("settings"))}
    known = [f"{k}={v}" for part in setup.values() for k, v in _mapping(part).items()]
    yield _of_texts(
        "settings of the program and its models", known,
        "switches, seeds, and what config and generation config say",
    )  # fmt: skip
    created, processes = meta.get("created"), len(index.source.processes)
    when = ""
    if isinstance(created, (int, float)) and 0 <= created < 1e11:  # up to the year 5138
        when = f"{datetime.fromtimestamp(created):%Y-%m-%d %H:%M:%S}"
    yield Holding("times and process ids", processes, 0, when, "when it was recorded")
    for what, name in _own_names().items():
        yield Holding(
            f"the {what} {name}", _mentions(index, name), 0, "", "who recorded it, or where"
        )
    for what in ("command line", "environment variables"):
        yield Holding(what, 0, 0, "", "never recorded")
    files = _other_files(index)
    yield Holding(
        "further files in the folder", len(files), sum(file.stat().st_size for file in files),
        files[0].name if files else "", "what you or a launch wrote there; redact leaves them out",
    )  # fmt: skip


def _mapping(value: object) -> dict[object, object]:
    return value if isinstance(value, dict) else {}


def _of_texts(what: str, texts: set[str] | list[str], tells: str) -> Holding:
    short = (text for text in texts if len(text) <= _WIDTH)
    example = max(short, key=lambda text: (len(text), text), default=next(iter(texts), ""))
    return Holding(what, len(texts), sum(map(_size, texts)), _cut(example), tells)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 2]} …"


def _site(record: Record | None) -> str:
    return "" if record is None else str(record.site)


def _nbytes(dtype: str, shape: str) -> int:
    """Return how many bytes a tensor of whole numbers has."""
    size = int(re.sub(r"\D", "", dtype)[:3] or 8) // 8
    try:
        for each in shape_of(shape):
            size *= each
    except (ValueError, RecursionError):
        return 0
    return size


def _numbers(index: Index, number: int) -> str:
    """Return the first elements of a tensor, as an example."""
    record = index.record(number)
    try:
        first = index.source.load(record).flatten()[:_IDS].tolist()
    except (CorruptDumpError, TensorLookupError):
        return _site(record)
    return f"{_site(record)}: {', '.join(map(str, first))} …"


def _own_names() -> dict[str, str]:
    """Return the names of this account and machine, to look for; those that are words are out."""
    asked: dict[str, Callable[[], Any]] = {
        "user name": getpass.getuser, "host name": socket.gethostname, "home": Path.home
    }  # fmt: skip
    names = {}
    for what, ask in asked.items():
        try:
            names[what] = str(ask())
        except (OSError, KeyError, RuntimeError, ImportError):
            continue
    return {what: name for what, name in names.items() if len(name) >= _SHORT and name != "root"}


def _mentions(index: Index, name: str) -> int:
    """Count how often a name stands in the texts of a run, as a word of its own."""
    if index.path is None:
        return 0
    word = re.compile(rb"(?<![A-Za-z0-9_])" + re.escape(os.fsencode(name)) + rb"(?![A-Za-z0-9_])")
    files = [file for file in index.path.rglob("*") if start_of(file.name) is None]
    files = [file for file in files if file.is_file() and not file.is_symlink()]
    count = 0
    for file in files or [index.path]:
        with own_file.open_file(file) as stream:
            while chunk := stream.read(_CHUNK):
                count += len(word.findall(chunk))
    return count


def _other_files(index: Index) -> list[Path]:
    """Return the files in a run's folder that recording did not write."""
    if index.path is None or not catalog.is_run(index.path):
        return []
    ours = {fmt.MARKER, fmt.INDEX, f"{fmt.INDEX}-wal", f"{fmt.INDEX}-shm", UPLOAD, SIGNALS}
    others = [f for f in index.path.rglob("*") if f.is_file() and f.name not in ours]
    return sorted(file for file in others if start_of(file.name) is None)
