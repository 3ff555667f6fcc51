"""docs/files.md is what docs/file_list.py makes of the modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_list_of_files_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "file_list.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
