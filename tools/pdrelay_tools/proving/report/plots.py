"""Plots as SVG: lines over one another with axes. Every text in them is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

_WIDTH = 640
_HEIGHT = 260
_LEFT = 56
_RIGHT = 150
_TOP = 16
_BOTTOM = 40
_COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
_TICKS: Final = 5

Points = Sequence[tuple[float, float]]


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    y_max: float | None = None,
) -> str:
    """Draw series of points as lines; an empty string if there is none."""
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return ""
    x_max = max(x for points in drawn.values() for x, _ in points) or 1.0
    top = y_max or max(y for points in drawn.values() for _, y in points) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" ',
        f'aria-label="{escape(title)}">',
        *_axes(x_label, y_label, x_max, top),
    ]
    for number, (name, points) in enumerate(drawn.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        at = " ".join(f"{_x(x, x_max):.1f},{_y(y, top):.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{at}"/>')
        place = _TOP + 14 * (number + 1)
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{place}" '
            f'fill="{colour}">{escape(name[:20])}</text>'
        )
    return "".join([*parts, "</svg>"])


def shares(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return sorted seconds as a cumulative distribution: pairs of ms and percent up to that."""
    step = max(1, len(values) // 200)
    places = [*range(0, len(values), step), *([len(values) - 1] if values else [])]
    return [(values[place] * 1e3, 100 * (place + 1) / len(values)) for place in places]


def _axes(x_label: str, y_label: str, x_max: float, y_max: float) -> list[str]:
    right = _WIDTH - _RIGHT
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#8c959f"/>']
    for tick in range(_TICKS + 1):
        x = x_max * tick / _TICKS
        y = y_max * tick / _TICKS
        parts.append(
            f'<text x="{_x(x, x_max):.1f}" y="{bottom + 15}" text-anchor="middle">{x:.3g}</text>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{_y(y, y_max) + 4:.1f}" text-anchor="end">{y:.3g}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(f'<text x="{_LEFT + 6}" y="{_TOP + 4}">{escape(y_label)}</text>')
    return parts


def _x(value: float, largest: float) -> float:
    return _LEFT + (_WIDTH - _RIGHT - _LEFT) * value / largest


def _y(value: float, largest: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(value, largest) / largest
