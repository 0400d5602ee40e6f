"""Downloads with progress, checked and never half there."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rewire.data.places import DataError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class _Bar:
    """The progress bar that pooch talks to, drawn by rich."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task, self.total = progress, task, 0

    def update(self, size: int) -> None:
        self.progress.update(self.task, total=self.total or None, advance=size)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        pass


def fetch(url: str, md5: str, folder: Path) -> Path:
    """The file at ``url``, in ``folder``, with this checksum.

    A file that is there already and has it is not downloaded again.
    """
    import pooch
    import requests
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    name = url.rsplit("/", 1)[1]
    pooch.get_logger().setLevel(logging.WARNING)
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console.print(f"Fetching {url}", soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = _Bar(progress, progress.add_task(name, total=None))
        try:
            path = pooch.retrieve(
                url, f"md5:{md5}", name, folder, downloader=pooch.HTTPDownloader(progressbar=bar)
            )
        except requests.RequestException as error:
            raise DataError(
                f"{url} could not be downloaded: {error}.\nTry again later, or put the file into "
                f"{folder} yourself."
            ) from error
        except ValueError as error:  # what pooch raises for a wrong checksum
            raise DataError(
                f"what came from {url} has the wrong checksum and was thrown away: {error}.\n"
                "Try again; if it happens again, the file has changed or something on the way "
                "changes it."
            ) from error
        except OSError as error:
            raise DataError(f"{folder / name} could not be written: {error}") from error
    return Path(path)
