"""Colours: each method has its own, the same in every plot, one for light and one for dark pages."""

from __future__ import annotations

PALETTE: dict[str, tuple[str, str]] = {  # name: (on light, on dark)
    "gse": ("#e0452b", "#ff7a5c"),
    "set": ("#0b8f7f", "#2fc7b2"),
    "rigl": ("#2563d9", "#6ea3ff"),
    "static": ("#8b93a3", "#8b95a8"),
    "dense": ("#23272f", "#e8eaf0"),
    "topkast": ("#7c4ddb", "#b197fc"),
    "snip": ("#c78500", "#f2b53c"),
    "grasp": ("#6d8b0c", "#a9c93a"),
    "synflow": ("#c8338f", "#f477c4"),
    "gradual": ("#8f5f43", "#cf9a7a"),
    "lottery": ("#0a89a8", "#45c4e3"),
    "dsr": ("#4f55c9", "#8f94ff"),
    "deepr": ("#ad1f50", "#f0708f"),
    "snfs": ("#2c8a3c", "#66cf78"),
    "grabo": ("#c78500", "#f2b53c"),
    "graest": ("#7c4ddb", "#b197fc"),
    "ink": ("#23272f", "#e8eaf0"),
    "muted": ("#687182", "#98a1b3"),
    "grid": ("#e6e8ee", "#2a303c"),
    "paper": ("#ffffff", "#161a22"),
}
_RAMP = ((104, 98, 222), (18, 155, 155), (240, 150, 40))  # readable on light and dark


def of(method: str, variant: int = 0) -> str:
    """The name of a method's colour; variants of it are paler."""
    name = method if method in PALETTE else "muted"
    return f"{name}/{variant}" if variant else name


def ramp(share: float) -> str:
    """From indigo over teal to amber, for what has an order."""
    place = min(1.0, max(0.0, share)) * (len(_RAMP) - 1)
    first = min(int(place), len(_RAMP) - 2)
    mixed = (
        round(a + (b - a) * (place - first))
        for a, b in zip(_RAMP[first], _RAMP[first + 1], strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def css(color: str) -> str:
    """A colour in a style: a variable of the page, or what it is."""
    name, _, variant = color.partition("/")
    if variant:
        return f"color-mix(in srgb, var(--{name}) {_share(variant):.0%}, var(--paper))"
    return f"var(--{name})" if name in PALETTE else color


def light(color: str) -> str:
    """A colour as it is on a light page, as ``#rrggbb``."""
    name, _, variant = color.partition("/")
    if name not in PALETTE:
        return color
    if not variant:
        return PALETTE[name][0]
    pairs = zip(_parts(PALETTE[name][0]), _parts(PALETTE["paper"][0]), strict=True)
    share = _share(variant)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def _share(variant: str) -> float:
    return float(max(0.35, 0.8 - 0.25 * int(variant)))


def _parts(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def variables() -> str:
    """The style that defines the colours, light and dark."""
    light, dark = (
        "".join(f"--{name}:{pair[side]};" for name, pair in PALETTE.items()) for side in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )
