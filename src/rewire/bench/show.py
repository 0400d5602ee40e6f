"""Results on the screen: progress while they are taken, then tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from rewire.bench.case import CHANNELS_LAST, CSR, OFF, STEP, Result
from rewire.precision import BFLOAT16, FLOAT32, PRECISIONS

_CONVS = "3x3 convolutions of VGG-16, ResNet-56"
# What the shapes of a kind are, and the title of its table; kinds of one title share it.
_TITLES = {
    "linear chain": ("width", "Four linear layers with ReLU"),
    "drop-in chain": ("width", "Four SparseLinear with ReLU, no engine"),
    "linear layer": ("width", "One linear layer, row-major in and out"),
    "conv chain": ("convolution", _CONVS),
    "conv layer": ("convolution", _CONVS),
    "model": ("model", "Training step: forward, backward, SGD"),
}


def console() -> Console:
    """The screen; a file or a pipe gets lines as long as the tables need."""
    made = Console(highlight=False, markup=False)
    return (
        made
        if made.is_terminal
        else Console(highlight=False, markup=False, width=max(made.width, 160))
    )


class Progress:
    """A bar while cases run; on anything but a terminal one line for every case that is done."""

    def __init__(self, screen: Console, total: int) -> None:
        self._screen, self._total, self._done, self._label = screen, total, 0, ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), console=screen, transient=True)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._screen.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._screen.is_terminal:
            self._bar.stop()

    def start(self, label: str) -> None:
        """A case begins."""
        self._label = label
        self._bar.update(self._task, description=label)

    def tick(self, share: float) -> None:
        """So much of the case is done."""
        self._bar.update(self._task, completed=self._done + share)

    def finish(self, found: str) -> None:
        """The case is done, with this result in one line."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        if not self._screen.is_terminal:
            self._screen.print(f"{self._done}/{self._total} {self._label}: {found}", soft_wrap=True)


def line(results: Iterable[Result]) -> str:
    """Results in a few words."""
    found = []
    for r in results:
        found.append(f"{r.mode} {times(r.ratio) or ms(r.ours_ms)}")
        if r.off_ms is not None:
            found.append(f"{OFF} {times(r.off_ratio) or ms(r.off_ms)}")
    return ", ".join(found)


def groups(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results that belong in one table or panel, by its title and what their shapes are."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        what, title = _TITLES[result.kind]
        if result.mode != STEP:
            title = f"{title}: {result.mode}, batch {result.batch}"
        found.setdefault((title, what), []).append(result)
    return found


def tables(results: Iterable[Result]) -> list[Table]:
    """One table for each kind and mode, with geometric means over its shapes."""
    return [_table(title, what, rows) for (title, what), rows in groups(results).items()]


def _table(title: str, what: str, results: Sequence[Result]) -> Table:
    others = list(dict.fromkeys(name for result in results for name in _others(result)))
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(what, no_wrap=True)
    bounded = any(result.least_ms is not None for result in results)
    both = any(result.off_ms is not None for result in results)
    ours = _ours(results)
    names = ["sparsity", *ours, *(["best"] if len(ours) > 1 else []), "dense", "which is"]
    names += _speed_ups(both)
    for name in (*names, *(["limit fp32"] if bounded else []), *others):
        if name == "which is":  # which may wrap, between words
            table.add_column(name, justify="right", min_width=len(CHANNELS_LAST.strip()))
        else:
            table.add_column(name, justify="right", no_wrap=True)
    table.caption = "dense: in the precision and memory format it is fastest in"
    if what == "convolution":
        table.caption = f"a x h x w: four with ReLU; a->b x h x w: one; {table.caption}"
    table.caption_justify = "left"
    last = ""
    for result in results:
        if last and result.shape != last:
            table.add_section()
        beside = _others(result)
        table.add_row(
            "" if result.shape == last else result.shape,
            percent(result.sparsity),
            *(_known(getattr(result, which).get(precision)) for which, precision in ours.values()),
            *([short(result.best_ours)] if len(ours) > 1 else []),
            "does not fit" if result.dense_ms is None else ms(result.dense_ms),
            short(result.best_dense or ""),
            highlighted(result.ratio),
            *([highlighted(result.off_ratio)] if both else []),
            highlighted(result.ratio_float32),
            *([times(_allowed(result))] if bounded else []),
            *(_compared(beside[name], result.ours_ms) if name in beside else "" for name in others),
        )
        last = result.shape
    if len({result.shape for result in results}) > 1:
        table.add_section()
        for row in _means(results, others, bounded, both, len(ours)):
            table.add_row(*row)
    return table


def _ours(results: Sequence[Result]) -> dict[str, tuple[str, str]]:
    """The columns of our times: their headings, and the attribute and the precision that they show."""
    both = any(result.off_ms is not None for result in results)
    alone = OFF if results[0].engine == "off" else "ours"
    found: dict[str, tuple[str, str]] = {}
    for heading, which in (("on" if both else alone, "ours_by"), ("off", "off_by")):
        for precision in PRECISIONS:
            if any(precision in getattr(result, which) for result in results):
                found[f"{heading} {short(precision)}"] = (which, precision)
    return found


def _known(milliseconds: float | None) -> str:
    return "" if milliseconds is None else ms(milliseconds)


def _speed_ups(both: bool) -> list[str]:
    return [*(["speed-up on", "speed-up off"] if both else ["speed-up"]), "vs fp32"]


def short(variant: str) -> str:
    """A precision, and maybe a memory format, in few letters.

    >>> short("bfloat16 channels-last")
    'bf16 channels-last'
    """
    return variant.replace(BFLOAT16, "bf16").replace(FLOAT32, "fp32")


def _allowed(result: Result) -> float | None:
    """How many times faster than dense, if it took no more than it has to."""
    if result.dense_ms is None or not result.least_ms:
        return None
    return result.dense_ms / result.least_ms


def _means(
    results: Sequence[Result], others: Sequence[str], bounded: bool, both: bool, columns: int
) -> Iterable[tuple[str | Text, ...]]:
    """For each sparsity the geometric mean over the shapes, of the ratio to each of the others; our times
    fill so many columns."""
    for index, sparsity in enumerate(dict.fromkeys(result.sparsity for result in results)):
        mine = [result for result in results if result.sparsity == sparsity]
        dense = geometric_mean([result.ratio for result in mine if result.ratio is not None])
        single = [result.ratio_float32 for result in mine if result.ratio_float32 is not None]
        empty = columns + (columns > 1) + 2
        cells: list[str | Text] = [*[""] * empty, highlighted(dense)]
        if both:
            off = [result.off_ratio for result in mine if result.off_ratio is not None]
            cells.append(highlighted(geometric_mean(off)))
        cells.append(highlighted(geometric_mean(single)))
        if bounded:
            allowed = [ratio for result in mine if (ratio := _allowed(result)) is not None]
            cells.append(times(geometric_mean(allowed)))
        for name in others:
            found = [(r.ours_ms, _others(r)[name]) for r in mine if name in _others(r)]
            cells.append(highlighted(geometric_mean([theirs / ours for ours, theirs in found])))
        yield ("" if index else "geometric mean", percent(sparsity), *cells)


def geometric_mean(values: Sequence[float]) -> float | None:
    """None for no values.

    >>> round(geometric_mean([2.0, 8.0]), 6)
    4.0
    """
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def footer(facts: Mapping[str, Any], peers: Mapping[str, str]) -> str:
    """What the numbers were taken on."""
    versions = f"rewire {facts['rewire']} ({facts['instruction_set']}), torch {facts['torch']}"
    lines = [f"{facts['cpu']}, {facts['threads']} threads, {versions}"]
    lines += [f"{name}: {status}" for name, status in peers.items()]
    return "\n".join(lines)


def overhead(microseconds: Mapping[str, float]) -> str:
    """One line on what a tiny call costs."""
    names = {"op": "rewire.ops.linear", "layer": "SparseLinear"}
    costs = (f"{names.get(name, name)} {cost:.0f} us" for name, cost in microseconds.items())
    return f"One call on a tiny layer: {', '.join(costs)}"


def _others(result: Result) -> dict[str, float]:
    """Milliseconds of all but dense."""
    return {} | ({} if result.csr_ms is None else {CSR: result.csr_ms}) | result.peers


def _compared(theirs: float, ours: float) -> Text:
    return Text(f"{ms(theirs)}  ").append(highlighted(theirs / ours))


def highlighted(ratio: float | None) -> Text:
    """How many times faster, in red where it is slower."""
    if ratio is None:
        return Text("")
    style = "red" if ratio < 1 else "yellow" if ratio < 2 else "bold green"
    return Text(times(ratio), style=style)


def times(ratio: float | None) -> str:
    """How many times faster, to three digits.

    >>> times(7.256), times(23.07), times(0.333)
    ('7.26x', '23.1x', '0.33x')
    """
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def ms(milliseconds: float) -> str:
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 100 else 0
    return f"{milliseconds:,.{digits}f} ms"


def percent(fraction: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * fraction:g} %"
