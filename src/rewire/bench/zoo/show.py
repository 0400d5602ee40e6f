"""Public models on the screen: a line for each, a table, and what the engine could not take in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rewire.bench.show import geometric_mean, highlighted, ms, percent, short, times
from rewire.bench.zoo.libraries import problem
from rewire.bench.zoo.measure import Measured, Plan, Reason
from rewire.bench.zoo.own import OWN
from rewire.bench.zoo.public import LIBRARIES, Public
from rewire.precision import PRECISIONS

_WIDTH = 110
_REASONS = 6  # that are shown for a model


def line(found: Measured) -> str:
    """One measurement in a few words."""
    if found.error:
        return f"failed: {found.error}"
    wrong = ", DIFFERS from its densified twin" if found.failed else ""
    return (
        f"ours {ms(found.ours_ms)} in {found.best_ours}, best float32 {times(found.ratio_float32)}, "
        f"best dense {times(found.ratio_best)}{wrong}"
    )


def tables(results: Sequence[Measured], plan: Plan) -> list[Table]:
    """Times and ratios with geometric means; then correctness, and how much the engine runs."""
    good = [found for found in results if not found.error]
    return [_times(good, plan), _checks(good)]


def _times(results: Sequence[Measured], plan: Plan) -> Table:
    adam = "fused AdamW" if plan.fused else "AdamW"
    made = _table(f"Training step ({adam}), batch {plan.batch}, images {plan.size} x {plan.size}")
    shown = [p for p in PRECISIONS if any(p in found.ours_by for found in results)]
    names = [f"ours {short(precision)}" for precision in shown]
    for name in ("sparsity", *names, "best float32", "vs float32", "best dense", "vs best"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("which are")
    for found in results:
        made.add_row(
            *(found.model, percent(found.sparsity)),
            *(ms(found.ours_by[precision]) for precision in shown),
            *(ms(found.dense_ms[found.float32]), highlighted(found.ratio_float32)),
            *(ms(found.dense_ms[found.best]), highlighted(found.ratio_best)),
            f"{short(found.best_ours)} vs {short(found.best)}",
        )
    made.add_section()
    for index, sparsity in enumerate(dict.fromkeys(found.sparsity for found in results)):
        mine = [found for found in results if found.sparsity == sparsity]
        made.add_row(
            *("" if index else "geometric mean", percent(sparsity), *[""] * (len(shown) + 1)),
            highlighted(geometric_mean([found.ratio_float32 for found in mine])),
            "",
            highlighted(geometric_mean([found.ratio_best for found in mine])),
        )
    made.caption = "vs: how many times faster the best of ours is than this"
    return made


def _checks(results: Sequence[Measured]) -> Table:
    made = _table("Largest relative difference from the densified twin, and what the engine runs")
    half = any(found.check is not None and found.check.bfloat16 is not None for found in results)
    errors = ["float64", "float32", "dense float32", *(["bfloat16", "dense bfloat16"] * half)]
    for name in ("sparsity", *errors, "recorded", "regions", "stops"):
        made.add_column(name, justify="right", no_wrap=True)
    for found in results:
        check, style = found.check, "bold red" if found.failed else ""
        values = (getattr(check, name.replace(" ", "_"), None) for name in errors)
        made.add_row(
            *(found.model, percent(found.sparsity)),
            *(Text("" if error is None else f"{error:.0e}", style=style) for error in values),
            *(f"{found.recorded}/{found.layers}", str(found.regions)),
            str(sum(stop.count for stop in found.stops)),
        )
    made.caption = (
        "of outputs, all gradients and running statistics, from the twin in float64: ours in float64, and "
        "in lower precisions ours and the dense twin; recorded: sparse layers that the engine runs, of all"
    )
    return made


def _table(title: str) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    made.min_width = len(title)
    made.caption_justify = "left"
    made.add_column("model", no_wrap=True)
    return made


def remarks(results: Sequence[Measured]) -> str:
    """What the engine could not take in, what stays dense, what failed, and whose definitions were used."""
    lines: list[str] = []
    for found in {one.model: one for one in results}.values():
        if found.error:
            continue
        where = (
            f"{found.recorded} of {found.layers} sparse layers recorded, {found.regions} regions"
        )
        if found.stops or found.stays_dense or found.recorded < found.layers:
            lines += ["", f"{found.model}: {where}"]
        lines += _listed("stopped", found.stops)
        lines += _listed("layers by themselves", found.alone)
        lines += ["  " + part for part in found.stays_dense.splitlines()]
    if lines:
        lines = [
            "",
            "What the engine could not take in, and what stays dense (rewire.explain has all)",
            *lines,
        ]
    for found in results:
        for name, error in found.left_out.items():
            lines += ["", f"{found.model}: dense {name} is left out, it failed: {error}"]
    if wrong := [one for one in results if one.failed and not one.error]:
        lines += ["", "Numbers that are not those of the densified twin"]
        for found in wrong:
            assert found.check is not None
            lines.append(f"  {found.model}, {percent(found.sparsity)}: most in {found.check.worst}")
    if errors := [one for one in results if one.error]:
        lines += ["", "Models that failed"]
        lines += [f"  {one.model}, {percent(one.sparsity)}: {one.error}" for one in errors]
    if own := [one.model for one in results if one.source == "own definition"]:
        missing = [why for library in LIBRARIES if (why := problem(library)) is not None]
        names = ", ".join(dict.fromkeys(own))
        lines += ["", *_wrapped(f"Rewire's own definitions, for want of the library: {names}", "")]
        lines += [line for why in missing for line in _wrapped(why, "  ")]
    return "\n".join(lines)


def _listed(what: str, reasons: Sequence[Reason]) -> list[str]:
    lines: list[str] = []
    for reason in reasons[:_REASONS]:
        more = f" and {len(reason.places) - 1} more places" if reason.places[1:] else ""
        lines += _wrapped(f"{what} {reason.count}x: {reason.reason}", "  ")
        lines += _wrapped(f"{reason.places[0]}{more}", "     ")
    if rest := reasons[_REASONS:]:
        lines.append(f"  {what} {sum(one.count for one in rest)}x for {len(rest)} other reasons")
    return lines


def names(public: Iterable[Public], sets: dict[str, tuple[str, ...]]) -> str:
    """All names, by set and library, and which libraries are installed."""
    by_library: dict[str, list[str]] = {}
    for model in public:
        by_library.setdefault(model.library, []).append(model.name)
    lines: list[str] = []
    for title, chosen in sets.items():
        lines += [f"The set {title}:", *_wrapped(", ".join(chosen), "  ")]
    for library, models in by_library.items():
        lines += [
            f"{library} ({problem(library) or 'installed'}):",
            *_wrapped(", ".join(models), "  "),
        ]
    lines += ["Rewire's own definitions:", *_wrapped(", ".join(OWN), "  ")]
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        *(text, _WIDTH), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
