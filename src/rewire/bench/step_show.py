"""Profiles and memory of training steps on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from rewire.bench.memory import Memory
from rewire.bench.profiling import Profile
from rewire.bench.show import ms, short


def profile_tables(what: str, found: Sequence[Profile]) -> Iterable[Table]:
    """Where the time goes by kind, engines and precisions side by side, and the slowest kernels of each."""
    table = _table(f"Where the time of our step goes: {what}", "kind")
    for one in found:
        table.add_column(
            f"engine {one.engine}, {short(one.precision)}", justify="right", no_wrap=True
        )
        table.add_column("share", justify="right", no_wrap=True)
    # The two differ in the name of one kind.
    for row in zip(*(one.kinds for one in found), strict=True):
        names = " / ".join(dict.fromkeys(kind.name for kind in row))
        table.add_row(
            names, *(c for kind in row for c in (ms(kind.milliseconds), _share(kind.share)))
        )
    table.add_section()
    table.add_row("step", *(cell for one in found for cell in (ms(one.step_ms), _share(1.0))))
    yield table
    for one in found:
        table = _table(
            f"Kernels that take most, engine {one.engine}, {one.precision}: {what}", "kernel"
        )
        table.add_column("pass", no_wrap=True)
        for name in ("calls", "time", "share"):
            table.add_column(name, justify="right", no_wrap=True)
        for kernel in one.kernels:
            share = _share(kernel.milliseconds / one.step_ms)
            calls = f"{kernel.calls:.0f}"
            table.add_row(kernel.name, kernel.phase, calls, ms(kernel.milliseconds), share)
        yield table


def memory_table(found: Sequence[Memory]) -> Table:
    """Megabytes of a step, dense and sparse, in each precision."""
    ways = list(dict.fromkeys((one.engine, one.precision) for one in found))
    ours, dense = (
        [way for way in ways if (way[0] is None) is is_dense] for is_dense in (False, True)
    )
    table = _table("Memory of a training step, beside model and data", "model")
    names = [f"engine {engine}, {short(precision)}" for engine, precision in ours]
    names += [f"dense, {short(precision)}" for _, precision in dense]
    for name in ("sparsity", *names):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for model, sparsity in dict.fromkeys((m.model, m.sparsity) for m in found if m.engine):
        if last and model != last:
            table.add_section()
        mine = {
            (m.engine, m.precision): m
            for m in found
            if m.model == model and m.sparsity in (sparsity, 0.0)
        }
        sizes = (f"{mine[way].step_mb:,.0f} MB" for way in (*ours, *dense))
        name = "" if model == last else model
        table.add_row(name, f"{100 * sparsity:g} %", *sizes)
        last = model
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.min_width = len(title)  # titles wrap at the width of the table
    table.add_column(first, no_wrap=True)
    return table


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"
