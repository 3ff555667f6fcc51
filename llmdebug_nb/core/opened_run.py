"""The interface of an opened run, for the stages after the store. `store.run.Run` implements it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llmdebug_nb.core.function_text import Function
from llmdebug_nb.core.records import (
    CallKey,
    Frame,
    Kernel,
    Node,
    Record,
    RootCall,
    Site,
    StepRows,
)
from llmdebug_nb.core.row_filter import (
    RecordColumns,
    RowFilter,
    ScalarColumns,
)

if TYPE_CHECKING:
    import pandas
    import torch
    from typing_extensions import Unpack


class ScalarRow(NamedTuple):
    """An argument, output or attribute that is not a tensor.

    ``value``: its text. ``phase``: None in older dumps.
    """

    generation: int
    step: int
    path: str
    call: int
    role: str
    slot: str
    type: str
    value: str | None
    phase: str | None = None


class StepCount(NamedTuple):
    """Records of a step; ``bad``: those that hold NaN or infinity."""

    generation: int
    step: int
    records: int
    bad: int


class Index(Protocol):
    """Questions about the records of a run."""

    def record_ids(self, **columns: Unpack[RecordColumns]) -> list[int]: ...
    def ids_of_call(self, key: CallKey, role: str) -> list[int]: ...
    def scalars(self, **columns: Unpack[ScalarColumns]) -> list[ScalarRow]: ...
    def frames(self, key: CallKey, whole: bool = False) -> tuple[Frame, ...]: ...
    def stacks(self, key: CallKey) -> dict[tuple[str, int], tuple[Frame, ...]]: ...
    def code(self, frame: Frame) -> str: ...
    def function(self, frame: Frame) -> Function | None: ...
    def recording_time(self, generation: int, step: int) -> float: ...
    def token_ids(self) -> dict[tuple[int, int], int]: ...
    def matching(self, wanted: RowFilter) -> array[int]: ...
    def nearest_match(self, wanted: RowFilter, start: int, backwards: bool) -> int | None: ...
    def count_by_path(self, bad: bool = False) -> Counter[str]: ...
    def count_by_step(self) -> list[StepCount]: ...
    def first_bad(self) -> int | None: ...
    def lost_reasons(self, n: int) -> list[tuple[str, int]]: ...
    def first_step(self, path: str, role: str) -> int | None: ...


class OpenedRun(Protocol):
    """An opened run; see `store.run.Run`."""

    name: str
    path: Path | None

    @property
    def index(self) -> Index: ...
    @property
    def label(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def nodes(self) -> list[Node]: ...
    @property
    def source(self) -> object: ...
    def info(self) -> dict[str, Any]: ...
    def record(self, number: int) -> Record: ...
    def records(
        self, *, after: int | None = None, n: int = -1, **columns: Unpack[RecordColumns]
    ) -> Iterator[Record]: ...
    def steps(self) -> list[RootCall]: ...
    def requests(self) -> list[StepRows]: ...
    def ids(
        self, step: int | None = None, generation: int = 0, rank: int | None = None
    ) -> dict[tuple[str, int], str]: ...
    def id_of(self, site: Site) -> str | None: ...
    def kernel(self, site: Site) -> Kernel | None: ...
    def find(self, path: str, step: int = 0, role: str = "output") -> Record: ...
    def load(self, record: Record) -> torch.Tensor: ...
    def host(self) -> pandas.DataFrame: ...
    def kernels(self) -> pandas.DataFrame: ...
