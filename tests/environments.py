"""Run the numeric tests as other machines would, and print a table of what passed.

    python tests/environments.py [--only NAME]... [PYTEST ARGUMENT]...

Each environment stands for a kind of machine or user: fewer threads, older processors, another
locale or time zone, a strict umask, no root, a path with a space. A locale without UTF-8 is not
among them: torch reads its own templates in the locale's encoding, and fails. Browser tests are
left out. Exit status 1 when a test failed in any environment.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = {".git", ".venv", "node_modules", "out", "build", "dist", "__pycache__"}
AS_NOBODY = ("runuser", "-u", "nobody", "--")
WITHOUT_BROWSER = ("-m", "not browser and not slow", "-p", "no:cacheprovider", "-q", "--tb=short")
PROCESSES = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True)
class Environment:
    """Variables to set, or the folder and user to run with."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    umask: int | None = None
    unprivileged: bool = False
    folder: str | None = None


def _with(**variables: str) -> Environment:
    return Environment(" ".join(f"{name}={value}" for name, value in variables.items()), variables)


ENVIRONMENTS = (
    _with(OMP_NUM_THREADS="1"),
    _with(OMP_NUM_THREADS="2"),
    _with(OMP_NUM_THREADS="4"),
    _with(ATEN_CPU_CAPABILITY="default"),
    _with(ATEN_CPU_CAPABILITY="avx2"),
    _with(ONEDNN_MAX_CPU_ISA="SSE41"),
    _with(MKL_ENABLE_INSTRUCTIONS="SSE4_2"),
    _with(LC_ALL="C"),
    _with(TZ="Pacific/Kiritimati"),
    Environment("umask 077", umask=0o077),
    Environment("another user", unprivileged=True),
    Environment("a path with a space and an ü", folder="a füll path"),
)


@contextmanager
def _place(environment: Environment) -> Iterator[Path]:
    """Yield where the tests run: here, or in a copy of the tree."""
    if environment.folder is None and not environment.unprivileged:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        copy = Path(base, environment.folder or "tree")
        shutil.copytree(ROOT, copy, ignore=lambda _, names: LEFT_OUT & set(names), symlinks=True)
        modules = ROOT / "labextension" / "node_modules"
        if modules.exists():
            (copy / "labextension" / "node_modules").symlink_to(modules.resolve())
        if environment.unprivileged:
            subprocess.run(["chown", "-R", "nobody:", str(copy)], check=True)
        yield copy


def _not_run(environment: Environment) -> str:
    """Return why an environment can't be had on this machine."""
    if not environment.unprivileged:
        return ""
    if os.getuid() != 0:
        return "this user is no root, so all other environments ran without its rights"
    try:
        subprocess.run([*AS_NOBODY, sys.executable, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return f"user nobody can't run {sys.executable}"
    return ""


def _python_path(place: Path) -> str:
    """Return PYTHONPATH with the tree that is tested in front, and no other copy of it."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(
        [str(place), *(other for other in others if other not in ("", str(ROOT)))]
    )


def run(environment: Environment, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return pytest's last line and the tests that failed."""
    if why := _not_run(environment):
        return f"not run: {why}", []
    with _place(environment) as place, tempfile.TemporaryDirectory() as home:
        variables = {**os.environ, "PYTHONPATH": _python_path(place), **environment.variables}
        command = [sys.executable, "-m", "pytest", *WITHOUT_BROWSER, *PROCESSES, *arguments]
        if environment.unprivileged:
            command = [*AS_NOBODY, *command]
            variables |= {"HOME": home, "USER": "nobody", "LOGNAME": "nobody"}
            os.chown(home, pwd.getpwnam("nobody").pw_uid, -1)
        done = subprocess.run(
            [*command, "--basetemp", str(Path(home, "tests"))],
            cwd=place,
            env=variables,
            umask=-1 if environment.umask is None else environment.umask,
            capture_output=True,
            check=False,
        )
    text = done.stdout.decode(errors="replace")
    lines = text.strip().splitlines() or done.stderr.decode(errors="replace").splitlines()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if done.returncode and not failed:
        failed = [f"pytest ended with status {done.returncode}"]
        print(text[-2000:], done.stderr.decode(errors="replace")[-2000:], file=sys.stderr)
    return lines[-1] if lines else "", failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="an environment, in part")
    chosen, arguments = parser.parse_known_args()
    wanted = [
        one
        for one in ENVIRONMENTS
        if not chosen.only or any(part in one.name for part in chosen.only)
    ]
    width, bad = max(len(one.name) for one in ENVIRONMENTS), False
    print(f"{'environment':{width}}  result")
    for environment in wanted:
        began = time.monotonic()
        said, failed = run(environment, arguments)
        bad |= bool(failed)
        said = re.sub(r" in [\d.]+s.*", "", said.strip("= "))
        print(f"{environment.name:{width}}  {said}, {time.monotonic() - began:.0f} s", flush=True)
        for test in failed:
            print(f"{'':{width}}    {test}", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
