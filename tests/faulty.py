"""Runs of `rewire` whose operations on files end or fail one by one; see test_faults.py.

``python faulty.py JSON`` runs in a process that has faults.c preloaded, and forks one child for each
case, so that torch is imported once. A case is a number of an operation, what is to happen there, and an
errno; then the same command runs again, without a fault. Prints a line of JSON for each case.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BEFORE, MIDDLE, FAIL = 1, 2, 3
ERRORS = ("ENOSPC", "EIO", "EROFS")


class Case(NamedTuple):
    """The operation, from 1 on, what happens there, and the name of an errno; or the seconds to live."""

    at: int
    action: int
    error: str = ""
    seconds: float = 0.0


class Outcome(NamedTuple):
    """What came of a case.

    Attributes:
        case: that.
        code: of the process with the fault; minus the number of the signal that ended it.
        said: what it wrote to stderr.
        again: the code of the same command afterwards.
        said_again: what that wrote.
        left: files by their path, with a checksum of what they hold, as :func:`contents` gives it.
    """

    case: Case
    code: int
    said: str
    again: int
    said_again: str
    left: dict[str, str]


def contents(folder: Path) -> dict[str, str]:
    """Checksums of the files of a run that must be the same however often it was stopped, and the names of
    those that must not be there."""
    from rewire import files

    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name in ("model.safetensors", "start.safetensors", "config.toml"):
            found[name] = files.sha256(path)
        elif path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in rows])
        elif path.name.startswith(files.HIDDEN):
            found[name] = "left over"
    return found


def command(arguments: list[str]) -> int:
    """The exit code of a command line."""
    from rewire.cli import app

    try:
        app(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def forked(action: Callable[[], int], said: Path) -> int:
    """The exit code of what runs in a process of its own; its stderr goes to a file."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            for number in (1, 2):
                os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Scene:
    """A folder that is prepared anew for each case, and a command that uses it."""

    def __init__(self, place: Path, arguments: list[str], before: str | None) -> None:
        self.place, self.arguments, self.before = place, arguments, before
        self.shim = ctypes.CDLL(None)
        self.shim.faults_arm.argtypes = [
            *(ctypes.c_char_p, ctypes.c_long),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ]

    def prepared(self, name: str) -> Path:
        """The folder that holds the run, ``runs`` in one of its own."""
        top = self.place / name
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        if self.before is not None:
            shutil.copytree(self.before, top / "run")
        return top

    def run(self, top: Path, case: Case | None = None, names: int = -1) -> tuple[int, str]:
        """Run the command, maybe with a fault or a list of all operations; its code and what it said."""
        said = top / "said.txt"
        said.unlink(missing_ok=True)
        arguments = [str(top / "run") if word == "RUN" else word for word in self.arguments]

        def act() -> int:
            if case is not None:
                error = getattr(errno, case.error) if case.error else 0
                folder = str(top / "run").encode()
                self.shim.faults_arm(folder, case.at, case.action, error, names)
                signal.setitimer(signal.ITIMER_REAL, case.seconds)
            return command(arguments)

        code = forked(act, said)
        return code, said.read_text()

    def operations(self) -> tuple[list[str], dict[str, str]]:
        """All operations of the command without a fault, and what it leaves."""
        top = self.prepared("whole")
        names = os.open(top / "names.txt", os.O_RDWR | os.O_CREAT)
        code, said = self.run(top, Case(0, 0), names)
        os.close(names)
        assert code == 0, said
        return (top / "names.txt").read_text().splitlines(), contents(top / "run")

    def outcome(self, case: Case) -> Outcome:
        """What comes of a case."""
        top = self.prepared("case")
        code, said = self.run(top, case)
        again, said_again = self.run(top)
        return Outcome(case, code, said, again, said_again, contents(top / "run"))


def main() -> None:
    import torch
    import torch._dynamo  # optimizers import it, which takes most of the time of a short run

    import rewire.training.cli
    import rewire.training.loop  # noqa: F401

    torch.set_num_threads(1)
    given: dict[str, Any] = json.loads(sys.argv[1])
    scene = Scene(Path(given["place"]), given["arguments"], given["before"])
    operations, left = scene.operations()
    print(json.dumps({"operations": operations, "left": left}), flush=True)
    for line in sys.stdin:
        print(json.dumps(scene.outcome(Case(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
