"""A grouped bar chart as SVG text: no library for two pictures."""

import math
from html import escape

WIDTH, HEIGHT = 960, 360
APART = 130  # names of the series
LEFT = 60
RIGHT = 10
TOP = 70
BOTTOM = 40
MARK = "#222"
COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aa3377")


def linear(values):
    """Return an axis of seconds from 0 on: its lines, as (value, label), and how tall a value is,
    as a share.
    """
    top = max(values)
    step = next(
        step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100) if top / step <= 8
    )
    return [
        (n * step, f"{n * step:g} s") for n in range(int(top / step) + 1)
    ], lambda value: value / top


def logarithmic(values):
    """Return the same of milliseconds, by powers of ten."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)) + 0.05)
    lines = [(10.0**n, f"{10.0**n:g} ms") for n in range(low, high + 1)]
    return lines, lambda value: (math.log10(value) - low) / (high - low)


def draw(series, groups, title, axis, form, *, marks=(), label=""):
    """Return a picture of ``series``: name -> a value (or None) for each of the groups.

    ``axis`` is one of the two above and ``form`` how a value is written. ``marks`` are values that
    are drawn as a dashed line across a group, and ``label`` is what they mean.
    """
    lines, share = axis([value for each in (*series.values(), marks) for value in each if value])

    def height(value):
        return share(value) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(WIDTH / 2, 20, title, 15)]
    for value, name in lines:
        y = HEIGHT - BOTTOM - height(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, name, anchor="end"))
    space = (WIDTH - LEFT - RIGHT) / len(groups)
    width = 0.8 * space / len(series)
    dashes = f'stroke="{MARK}" stroke-width="2" stroke-dasharray="5 3"'
    for group, value in enumerate(marks):
        if value:
            x, y = LEFT + (group + 0.05) * space, HEIGHT - BOTTOM - height(value)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x + 0.9 * space:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                f"{dashes}/>"
            )
    for number, (name, each) in enumerate(series.items()):
        x = LEFT + number * APART
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x:.1f}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, 47, name, anchor="start"))
        for group, value in enumerate(each):
            if value:
                x = LEFT + group * space + 0.1 * space + number * width
                tall = height(value)
                y = HEIGHT - BOTTOM - tall
                box = f'width="{width - 2:.1f}" height="{tall:.1f}"'
                parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {box} fill="{colour}"/>')
                parts.append(_text(x + width / 2 - 1, y - 4, form.format(value), 10, halo=True))
    if any(marks):
        x = LEFT + len(series) * APART
        parts.append(f'<line x1="{x}" x2="{x + 28}" y1="42" y2="42" {dashes}/>')
        parts.append(_text(x + 34, 47, label, anchor="start"))
    for group, name in enumerate(groups):
        parts.append(_text(LEFT + (group + 0.5) * space, HEIGHT - BOTTOM + 18, name))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="#222">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def _text(x, y, text, size=12, anchor="middle", *, halo=False):
    # over a dashed line
    around = ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{around}>{escape(text)}</text>'
