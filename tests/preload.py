"""Small C libraries that are loaded into a process before all others, to let its system calls fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def compiled(source: Path, to: Path) -> Path:
    """The library of one C file; skips the test where there is no compiler or no way to preload."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and LD_PRELOAD")
    library = to / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library]
    subprocess.run([*command, source, "-ldl"], check=True)
    return library


def environment(library: Path, **more: str) -> dict[str, str]:
    """For a process that has the library."""
    before = os.environ.get("LD_PRELOAD", "")
    return {**os.environ, "LD_PRELOAD": f"{before} {library}".strip(), **more}
