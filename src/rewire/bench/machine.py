"""What a measurement was taken on, and writing it to a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import rewire
from rewire import ops


def facts() -> dict[str, Any]:
    """The machine and the versions, as they belong beside any timing."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": ops.instruction_set(),
        "rewire": rewire.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def busy() -> str | None:
    """A warning if other processes have kept the machine busy over the last minute."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not every system knows
        return None
    if load < 0.5 * (os.cpu_count() or 1):
        return None
    return f"The machine is busy (load {load:.1f}): timings and ratios will be off."


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON so that the file is there in full or not at all."""
    text = json.dumps(document, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
