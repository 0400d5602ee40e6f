"""Runs that are killed, or whose disk fails, at every single operation on their files.

What holds whatever happens: the same command again ends with the same bits as a run that nothing
happened to, leaves no temporary file, and a fault that is no kill ends the run with a message that names a
file.

By default a few operations of each kind fail. ``pytest -m slow tests/test_faults.py`` does all, in all
scenes, and prints how many there were.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import faulty
import preload
from faulty import BEFORE, ERRORS, FAIL, MIDDLE, Case, Outcome
from rewire.methods import METHODS

TRAIN = "train --epochs 1 --drops 1 --until 1 --every 20 --checkpoint-every 25 --quiet --threads 1"
LOTTERY = (
    "train --method lottery --rounds 0,0.5 --sparsity 0.5 --epochs 0.5 --drops 0.5 --checkpoint-every 12 "
    "--quiet --threads 1"
)
FAULTS = [(BEFORE, ""), (MIDDLE, ""), *((FAIL, error) for error in ERRORS)]


class Faults:
    """A scene in a process of its own.

    Attributes:
        operations: what the command does to files, in order.
        left: what it leaves.
    """

    def __init__(self, place: Path, arguments: str, before: Path | None = None) -> None:
        library = preload.compiled(Path(__file__).with_name("faults.c"), place)
        given = {
            "place": str(place),
            "arguments": [*arguments.split(), *([] if "RUN" in arguments else ["--out", "RUN"])],
            "before": None if before is None else str(before),
        }
        self._process = subprocess.Popen(
            [sys.executable, faulty.__file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=preload.environment(library),
        )
        self.counts: Counter[str] = Counter()
        # Folders that are there need not be made, whatever the error.
        self._there = {"mkdir ."} if before is not None else set()
        self._there |= {"mkdir checkpoints"} if "--resume" in arguments else set()
        found = self._read()
        self.operations: list[str] = found["operations"]
        self.left: dict[str, str] = found["left"]
        assert not any("left over" in what for what in self.left.values())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def try_(self, case: Case) -> Outcome:
        """See that a case ends well."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        outcome = Outcome(*self._read())
        what = f"{case}: {self.operations[case.at - 1]}\n{outcome.said}\n{outcome.said_again}"
        if case.action == FAIL and self.operations[case.at - 1] in self._there:
            assert outcome.code == 0, what
        elif case.action == FAIL:
            assert outcome.code == 1, what
            assert "Traceback" not in outcome.said, what
            assert "case/run" in outcome.said, what
        elif case.seconds:
            assert outcome.code in (0, -signal.SIGALRM), what
        else:
            assert outcome.code == -signal.SIGKILL, what
        assert outcome.again == 0 or "finished" in outcome.said_again, what
        assert outcome.left == self.left, what
        kind = {BEFORE: "killed before", MIDDLE: "killed in the middle", FAIL: case.error}
        self.counts[kind.get(case.action, "killed after a while")] += 1
        return outcome

    def __str__(self) -> str:
        kinds = Counter(operation.split()[0] for operation in self.operations)
        done = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{len(self.operations)} operations ({dict(kinds)}): {done}"


def few(operations: Sequence[str]) -> Iterator[Case]:
    """A case for each kind of operation on each kind of file."""
    kinds: dict[str, int] = {}
    for number, operation in enumerate(operations, 1):
        name, path = operation.split()
        file = "temporary" if ".tmp" in path else Path(path).name.split("-")[0]
        kinds.setdefault(f"{name} {file}", number)
    for turn, number in enumerate(kinds.values()):
        yield Case(number, *FAULTS[turn % len(FAULTS)])


def every(operations: Sequence[str]) -> Iterator[Case]:
    """All faults at all operations."""
    for number in range(1, len(operations) + 1):
        for fault in FAULTS:
            yield Case(number, *fault)


def test_a_few_faults(tmp_path: Path) -> None:
    faults = Faults(tmp_path, TRAIN)
    kinds = {operation.split()[0] for operation in faults.operations}
    assert kinds >= {"create", "write", "fsync", "rename", "unlink", "mkdir", "truncate", "chmod"}
    for case in list(few(faults.operations))[::3]:
        faults.try_(case)
    faults.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and lottery of another seed, and a run that stopped before its end."""
    place = tmp_path_factory.mktemp("runs")
    for name, arguments in (("run", TRAIN), ("lottery", LOTTERY)):
        command = [*arguments.split(), "--seed", "1", "--out", str(place / name)]
        subprocess.run([sys.executable, "-m", "rewire", *command], check=True)
    shutil.copytree(place / "run", place / "stopped")
    (place / "stopped" / "model.safetensors").unlink()
    return place


SCENES = {
    "train": (TRAIN, None),
    "lottery": (LOTTERY, None),
    "resume": ("train --resume RUN --quiet --threads 1 --checkpoint-every 9", "stopped"),
    "overwrite": (f"{TRAIN} --overwrite", "run"),
    "overwrite a lottery": (f"{LOTTERY} --overwrite", "lottery"),
}


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_all_faults(
    scene: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, before = SCENES[scene]
    faults = Faults(tmp_path, arguments, None if before is None else runs / before)
    for case in every(faults.operations):
        faults.try_(case)
    faults.close()
    with capsys.disabled():
        print(f"\n{scene}: {faults}")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_kills_of_every_method_at_random(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = "--rounds 0,0.5 --sparsity 0.5" if method == "lottery" else ""
    arguments = f"train --method {method} {rounds} --scale 0.04 --checkpoint-every 10 --quiet"
    faults = Faults(tmp_path, f"{arguments} --threads 1")
    draw = random.Random(method)
    for _ in range(10):
        faults.try_(Case(0, 0, "", draw.uniform(0.05, 2.0)))
    for _ in range(10):
        faults.try_(Case(draw.randint(1, len(faults.operations)), *draw.choice(FAULTS)))
    faults.close()
    with capsys.disabled():
        print(f"\n{method}: {faults}")
