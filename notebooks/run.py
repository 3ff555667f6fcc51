"""Run a notebook headless, show its progress, and print what its verdict cell said.

    python notebooks/run.py [NOTEBOOK]        # default: quickstart.ipynb beside this file

Exit status 1, with the cell and its error, when a cell fails. The notebook file does not change.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

QUICKSTART = Path(__file__).with_name("quickstart.ipynb")
WIDTH = 72
CELL_TIMEOUT = 1200  # seconds; the slowest cell trains for half a minute on two cores


class Runner(NotebookClient):
    """Runs cells as Jupyter does, and prints as they print: all of it for those tagged ``live``."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream" and "live" in tags(cell):
            print(
                "".join(f"        {line}\n" for line in msg["content"]["text"].splitlines()),
                end="",
                flush=True,
            )
        return super().process_message(msg, cell, cell_index)


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def printed(cell: Any) -> str:
    """Return what a cell printed, and what it displayed as text."""
    texts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif output.output_type == "display_data" and output.data:  # a bar that is gone has none
            texts.append(f"\n{output.data.get('text/plain', '')}\n")
    return "".join(texts)


def first_line(cell: Any) -> str:
    lines = [line for line in cell.source.splitlines() if line.strip()]
    return lines[0] if lines else ""


def execute(path: Path, quiet: bool = False, python: Path | None = None) -> Any:
    """Run every cell in the notebook's folder; return it with its outputs.

    ``python``: the one that runs them, in place of this one.

    Raises:
        CellExecutionError: a cell failed. DeadKernelError: the kernel did.
    """
    notebook = nbformat.read(path, as_version=4)
    codes = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    # no kernel folders: a kernel of that name elsewhere on the machine would be another Python
    manager = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    if python is not None:
        manager.kernel_spec.argv[0] = str(python)
    started = 0.0

    def on_start(cell: Any, cell_index: int) -> None:
        nonlocal started
        started = time.perf_counter()
        if cell.cell_type == "code" and not quiet:
            end = "\n" if "live" in tags(cell) else ""
            number = f"{codes.index(cell_index) + 1:2}/{len(codes)}"
            print(f"[{number}] {first_line(cell)[:WIDTH]:{WIDTH}}", end=end, flush=True)

    def on_done(cell: Any, cell_index: int, execute_reply: Any) -> None:
        if not quiet:
            lead = f"        {'':{WIDTH}}" if "live" in tags(cell) else ""
            print(f"{lead} {time.perf_counter() - started:5.1f} s", flush=True)

    make = NotebookClient if quiet else Runner
    client = make(
        notebook,
        km=manager,
        extra_arguments=["--log-level=ERROR"],
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(path.parent.resolve())}},
        on_cell_start=on_start,
        on_cell_executed=on_done,
    )
    # by default nbclient leaves the kernel of a given manager running
    return client.execute(cleanup_kc=True)


def main(argv: list[str]) -> int:
    path = Path(argv[0]) if argv else QUICKSTART
    began = time.time()
    try:
        notebook = execute(path)
    except (CellExecutionError, DeadKernelError) as error:
        print(f"\n{path.name} failed:\n{error}", file=sys.stderr)
        return 1
    for cell in notebook.cells:
        if "verdict" in tags(cell):
            print(f"\n{printed(cell).strip()}")
    for page in sorted(path.parent.glob("*.html")):
        if page.stat().st_mtime >= began - 1:
            print(f"\nThe report, to open in a browser: {os.path.relpath(page)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
