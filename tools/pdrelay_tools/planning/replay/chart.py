"""Bars of the summaries as SVG text."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from pdrelay_tools.planning.replay.summary import Summary

_WIDTH = 960
_PANEL = 480
_LEFT = 130
_ROW = 14
_TOP = 56
_COLOURS = ("#4477aa", "#ccbb44", "#aa3377")
_PANELS: Sequence[
    tuple[str, Sequence[tuple[str, Callable[[Summary], float | None]]], Callable[[float], str]]
] = (
    (
        "time to first token",
        (
            ("p50", lambda row: row.ttft_p50),
            ("p95", lambda row: row.ttft_p95),
            ("p99", lambda row: row.ttft_p99),
        ),
        lambda value: f"{value * 1e3:,.0f} ms",
    ),
    (
        "time between tokens",
        (("p50", lambda row: row.itl_p50), ("p99", lambda row: row.itl_p99)),
        lambda value: f"{value * 1e3:,.1f} ms",
    ),
    (
        "prompt tokens found in own cache",
        (("prefill", lambda row: row.prefill_hits), ("decode", lambda row: row.decode_hits)),
        lambda value: f"{value:.0%}",
    ),
    (
        "requests within the targets, a second",
        (("", lambda row: row.good_per_s),),
        lambda value: f"{value:,.2f}",
    ),
)


def draw(rows: Sequence[Summary], title: str) -> str:
    """Return a picture of four panels, each with the bars of all policies."""
    heights = [_TOP + len(rows) * (len(series) * _ROW + 10) for _, series, _ in _PANELS]
    height = 40 + max(heights[:2]) + max(heights[2:])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_WIDTH / 2, 24, title, size=15, anchor="middle"),
    ]
    for number in range(len(_PANELS)):
        y = 40 + (max(heights[:2]) if number > 1 else 0)
        parts += _panel(number, rows, number % 2 * _PANEL, y)
    return "\n".join([*parts, "</svg>\n"])


def _panel(number: int, rows: Sequence[Summary], x: float, y: float) -> Iterator[str]:
    title, series, form = _PANELS[number]
    yield _text(x + _LEFT, y + 16, title, size=13)
    for index, (name, _) in enumerate(series):
        if name:
            yield _bar(x + _LEFT + index * 80, y + 26, 10, index)
            yield _text(x + _LEFT + 14 + index * 80, y + 35, name)
    most = max((value(row) or 0.0 for row in rows for _, value in series), default=0.0) or 1.0
    y += _TOP - 8
    for row in rows:
        yield _text(x + _LEFT - 8, y + len(series) * _ROW / 2 + 3, row.policy, anchor="end")
        for index, (_, value) in enumerate(series):
            amount = value(row)
            width = (_PANEL - _LEFT - 80) * (amount or 0.0) / most
            yield _bar(x + _LEFT, y, width, index)
            yield _text(x + _LEFT + width + 4, y + 9, "-" if amount is None else form(amount))
            y += _ROW
        y += 10


def _bar(x: float, y: float, width: float, colour: int) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_ROW - 4}" fill="{_COLOURS[colour]}"/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
