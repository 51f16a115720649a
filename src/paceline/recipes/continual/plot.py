"""Picture of the matrix: one SVG that any browser opens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.recipes.continual.matrix import Matrix

CELL, LEFT, TOP = 54, 92, 54


def heat_map(matrix: Matrix, names: Sequence[str], title: str) -> str:
    """Return an SVG: rows are the last task learned, columns the task measured; darker is better, empty: not
    measured."""
    rows, columns = matrix.shape
    width, height = LEFT + CELL * columns + 20, TOP + CELL * rows + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{_escaped(title)}</text>',
    ]
    for column in range(columns):
        x = LEFT + CELL * column + CELL / 2
        parts.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{_escaped(names[column])}</text>')
    for row in range(rows):
        y = TOP + CELL * row
        label = f"after {names[row]}"
        parts.append(f'<text x="{LEFT - 8}" y="{y + CELL / 2 + 4}" text-anchor="end">{_escaped(label)}</text>')
        for column in range(columns):
            value = float(matrix[row, column])
            x = LEFT + CELL * column
            if math.isnan(value):
                parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="#f2f2f2"/>')
                continue
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{_shade(value)}"/>')
            ink = "white" if value > 0.55 else "#222"
            where = f'x="{x + CELL / 2 - 1}" y="{y + CELL / 2 + 4}" text-anchor="middle"'
            parts.append(f'<text {where} fill="{ink}">{100 * value:.1f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _shade(value: float) -> str:
    """Return a colour from near white to dark blue."""
    light, dark = (236, 242, 250), (16, 62, 130)
    red, green, blue = (round(a + (b - a) * value) for a, b in zip(light, dark, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
