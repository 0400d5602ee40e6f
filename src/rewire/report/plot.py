"""A plot as data: lines, bands and axes. ``svg`` and ``png`` draw it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

_MOST = 160  # points of a line; more cannot be seen


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        label: its name.
        color: a name of ``colors.PALETTE``, or ``#rrggbb``.
        x, y: points; those that are not finite are left out. A line without x goes all the way across.
        low, high: the edges of its band.
        dashed: drawn thin and broken.
        dots: mark the points.
        paper: whether these are the paper's numbers; all such lines share an entry of the legend.
    """

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    dots: bool = False
    paper: bool = False

    @property
    def entry(self) -> str:
        """Its entry in the legend."""
        return "paper" if self.paper else self.label

    @property
    def points(self) -> list[tuple[float, float]]:
        """Those that can be drawn, in the order of x."""
        return sorted(p for p in zip(self.x, self.y, strict=False) if all(map(math.isfinite, p)))

    @property
    def band(self) -> list[tuple[float, float, float]]:
        """x, lower and upper edge; empty if there is no width to see."""
        rows = zip(self.x, self.low, self.high, strict=False)
        found = sorted(row for row in rows if all(map(math.isfinite, row)))
        return found if any(high > low for _, low, high in found) else []


@dataclass(frozen=True)
class Plot:
    """What to draw.

    Attributes:
        name: of its files.
        title, subtitle: above it.
        x_label, y_label: of the axes.
        series: the lines, those on top last.
        log_x, log_y: whether an axis is logarithmic.
        ticks: positions and labels of the x axis, if not to be chosen.
        unit: after numbers of the y axis, such as %.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[tuple[float, str]] = field(default=())
    unit: str = ""
    subtitle: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to see."""
        return not any(s.points or (not s.x and s.y) for s in self.series)

    @property
    def legend(self) -> list[Series]:
        """A line for each entry, that of the paper last."""
        found = {s.entry: s for s in self.series if not s.paper}
        if any(s.paper for s in self.series):
            found["paper"] = Series("paper", "muted", (), (), dashed=True, paper=True)
        return list(found.values())

    def scales(self) -> tuple[Scale, Scale]:
        """The axes that hold everything."""
        x = [v for s in self.series for v, _ in s.points] + [v for v, _ in self.ticks]
        y = [v for s in self.series for v in (*s.y, *s.low, *s.high) if math.isfinite(v)]
        return Scale.over(x, self.log_x, margin=0.0 if not self.ticks else 0.06), Scale.over(
            y, self.log_y, margin=0.05
        )

    def x_ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the x axis."""
        return list(self.ticks) or [(v, short(v)) for v in self.scales()[0].ticks(6)]

    def y_ticks(self) -> list[tuple[float, str]]:
        """Positions and labels of the y axis."""
        space = "\u2009" if self.unit == "%" else ""
        return [(v, f"{short(v)}{space}{self.unit}") for v in self.scales()[1].ticks(5)]


@dataclass(frozen=True)
class Scale:
    """An axis from its lowest to its highest value."""

    low: float
    high: float
    log: bool

    @staticmethod
    def over(values: Iterable[float], log: bool, margin: float) -> Scale:
        """One that holds all values, with some room beside them."""
        held = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        ends = [math.log(v) if log else v for v in (min(held), max(held))]
        room = margin * (ends[1] - ends[0]) or (0.5 * abs(ends[0]) * 0.1 or 0.5) * (
            ends[0] == ends[1]
        )
        low, high = ends[0] - room, ends[1] + room
        if not log and low < 0 <= min(held):
            low = 0.0
        return Scale(math.exp(low), math.exp(high), True) if log else Scale(low, high, False)

    def share(self, value: float) -> float:
        """Where on the axis a value is, from 0 to 1."""
        map_: Callable[[float], float] = math.log if self.log else float
        if self.log and value <= 0:
            return 0.0
        low, high = map_(self.low), map_(self.high)
        return (map_(value) - low) / ((high - low) or 1.0)

    def ticks(self, wanted: int) -> list[float]:
        """Round values, about so many."""
        if self.log:
            found = [m * 10.0**e for e in range(-12, 13) for m in (1, 2, 5)]
            held = [v for v in found if self.low <= v <= self.high]
            tens = [v for v in held if f"{v:e}".startswith("1.0")]
            chosen = tens if len(held) > wanted + 2 and len(tens) > 2 else held
            if len(chosen) > 1:
                return chosen
        raw = (self.high - self.low) / wanted
        size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
        step = size * min((m for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999), default=10)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters.

    >>> short(0.25), short(12000), short(3e6), short(80.0)
    ('0.25', '12k', '3M', '80')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def thin(*columns: Sequence[float]) -> tuple[list[float], ...]:
    """Fewer points, the last of them among them, if there are more than can be seen."""
    count = len(columns[0])
    if count <= _MOST:
        return tuple(list(column) for column in columns)
    kept = sorted({round(i * (count - 1) / (_MOST - 1)) for i in range(_MOST)})
    return tuple([column[i] for i in kept] for column in columns)


def slug(text: str) -> str:
    """A text as part of a file name or an address.

    >>> slug("VGG-16 on CIFAR-10, sparsity 98 %")
    'vgg-16-on-cifar-10-sparsity-98'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("é", "e").replace("ő", "o")).strip("-.")
