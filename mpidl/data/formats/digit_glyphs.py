"""Define the type faces of the embedded digit set as strokes, so that no font is needed.

A glyph is a path of commands in a box that is 100 units high. The y axis points down:

    M x y                move to            L x y            line to
    h x y                quarter of an ellipse to (x, y), leaving horizontally
    v x y                quarter of an ellipse to (x, y), leaving vertically
    C x1 y1 x2 y2 x y    cubic Bezier curve to (x, y)

A face also has a slant (x per y), a pen and a roundness. The pen has a width and a height relative
to the stroke width. A flat pen draws thick stems and thin bars. The roundness is the length of the
control arms of a quarter ellipse relative to the semi-axes. A roundness of 0.55 approximates an
ellipse, and larger values give squarer curves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STEPS = 5  # number of line segments per curve


class Face(NamedTuple):
    """A type face: the glyphs of the digits 0 to 9, and the slant, pen and roundness."""

    glyphs: tuple[str, ...]
    slant: float = 0.0
    pen: tuple[float, float] = (1.0, 1.0)
    roundness: float = 0.55


FACES = {
    # A geometric sans: circles and straight lines, 1 with a flag, closed 4, curled 6 and 9.
    "round": Face(
        (
            "M 30 0 h 58 50 v 30 100 h 2 50 v 30 0",
            "M 12 20 L 30 0 L 30 100",
            "M 4 28 v 30 0 h 56 27 C 56 52 22 72 2 100 L 58 100",
            "M 5 20 v 29 0 h 53 24 v 29 47 L 22 47 M 29 47 h 58 73 v 30 100 h 2 78",
            "M 44 100 L 44 0 L 2 70 L 60 70",
            "M 52 0 L 14 0 L 8 46 C 14 38 22 36 30 36 h 58 68 v 30 100 h 3 80",
            "M 52 9 C 28 -10 2 14 2 66 v 30 100 h 58 68 v 30 37 h 2 66",
            "M 2 0 L 58 0 L 22 100",
            "M 30 46 h 54 23 v 30 0 h 6 23 v 30 46 h 58 73 v 30 100 h 2 73 v 30 46",
            "M 8 91 C 32 110 58 86 58 34 v 30 0 h 2 32 v 30 63 h 58 34",
        )
    ),
    # A condensed sans with straight sides, 1 without a flag, 7 with a curved stem.
    "narrow": Face(
        (
            "M 20 0 h 38 30 L 38 70 v 20 100 h 2 70 L 2 30 v 20 0",
            "M 20 0 L 20 100",
            "M 2 26 v 20 0 h 38 28 C 38 56 4 68 2 100 L 38 100",
            "M 2 22 v 20 0 h 38 24 v 18 48 L 12 48 M 18 48 h 38 73 v 20 100 h 2 77",
            "M 30 100 L 30 0 L 0 72 L 42 72",
            "M 36 0 L 4 0 L 4 49 C 8 41 12 38 20 38 h 38 66 L 38 72 v 20 100 h 2 77",
            "M 37 22 v 20 0 h 2 30 L 2 72 v 20 100 h 38 74 L 38 66 v 20 42 h 2 66",
            "M 0 0 L 40 0 C 24 40 16 60 14 100",
            "M 20 47 h 36 24 v 20 0 h 4 24 v 20 47 h 38 74 v 20 100 h 2 74 v 20 47",
            "M 3 78 v 20 100 h 38 70 L 38 28 v 20 0 h 2 26 L 2 34 v 20 58 h 38 34",
        ),
        roundness=0.65,
    ),
    # A slab serif with a flat pen, 3 with a flat top, 7 with a hook.
    "slab": Face(
        (
            "M 29 0 h 55 50 v 29 100 h 3 50 v 29 0",
            "M 12 16 C 20 14 28 8 30 0 L 30 100 M 10 100 L 50 100",
            "M 6 26 v 29 0 h 54 26 C 54 50 20 70 4 100 L 56 100 L 56 84",
            "M 6 14 L 6 0 L 52 0 L 26 40 C 44 40 56 50 56 70 v 28 100 h 4 80",
            "M 42 100 L 42 0 L 2 68 L 60 68 M 28 100 L 56 100",
            "M 50 12 L 50 0 L 12 0 L 10 46 C 16 38 22 38 28 38 h 56 68 v 28 100 h 4 80",
            "M 48 2 C 20 8 4 36 4 66 v 29 100 h 54 68 v 29 38 h 4 66",
            "M 4 16 L 4 0 L 56 0 L 22 100",
            "M 29 46 h 50 23 v 29 0 h 8 23 v 29 46 h 56 73 v 29 100 h 2 73 v 29 46",
            "M 10 98 C 38 92 54 64 54 34 v 29 0 h 4 32 v 29 62 h 54 34",
        ),
        pen=(1.15, 0.85),
    ),
    # Rounded rectangles as on a dial, open 4, straight tops and tails.
    "square": Face(
        (
            "M 30 0 L 38 0 h 56 18 L 56 82 v 38 100 L 20 100 h 2 82 L 2 18 v 20 0 L 30 0",
            "M 16 8 L 32 0 L 32 100",
            "M 2 18 v 20 0 L 38 0 h 56 18 L 56 32 v 38 48 L 20 48 h 2 66 L 2 100 L 56 100",
            "M 2 0 L 38 0 h 56 18 L 56 30 v 38 48 L 16 48 M 38 48 h 56 66 L 56 82 v 38 100 L 2 100",
            "M 4 0 L 4 60 L 58 60 M 44 26 L 44 100",
            "M 52 0 L 4 0 L 4 43 L 38 43 h 56 61 L 56 82 v 38 100 L 2 100",
            "M 50 0 L 20 0 h 2 18 L 2 82 v 20 100 L 38 100 h 56 82 L 56 60 v 38 42 L 2 42",
            "M 2 0 L 56 0 L 56 18 C 56 40 26 56 26 100",
            "M 20 47 L 38 47 h 54 30 L 54 16 v 38 0 L 20 0 h 4 16 L 4 30 v 20 47 "
            "h 2 64 L 2 82 v 20 100 L 38 100 h 56 82 L 56 64 v 38 47",
            "M 8 100 L 38 100 h 56 82 L 56 18 v 38 0 L 20 0 h 2 18 L 2 40 v 20 58 L 56 58",
        ),
        roundness=0.65,
    ),
    # Handwriting: crossed 7, open 4, 9 with a straight tail, 8 in one stroke.
    "school": Face(
        (
            "M 34 1 C 8 -4 0 40 4 66 C 8 112 48 106 54 60 C 58 20 52 -4 28 2",
            "M 12 26 L 34 0 L 32 100",
            "M 6 22 C 10 -8 54 -8 52 26 C 50 56 20 80 2 98 C 20 88 40 106 58 94",
            "M 6 14 C 20 -8 52 -4 50 22 C 48 40 36 46 22 46 C 44 46 58 58 56 74 "
            "C 52 106 12 106 2 86",
            "M 22 0 L 2 62 L 58 60 M 42 34 L 38 100",
            "M 16 2 L 10 44 C 30 32 58 42 56 68 C 54 100 18 106 2 90 M 16 2 L 54 0",
            "M 44 0 C 20 14 2 46 4 72 C 8 108 54 108 54 72 C 52 44 14 44 6 74",
            "M 4 4 L 56 0 L 24 100 M 14 50 L 52 50",
            "M 50 14 C 40 -8 6 -2 8 22 C 10 46 54 50 54 76 C 52 108 6 106 6 78 C 8 52 50 44 50 14",
            "M 52 20 C 42 -8 4 -2 4 28 C 4 56 46 54 52 20 L 44 100",
        ),
        slant=0.05,
    ),
    # A slanted face in the old style, written with a broad pen.
    "italic": Face(
        (
            "M 28 0 h 50 50 v 28 100 h 6 50 v 28 0",
            "M 18 16 L 32 0 L 32 100",
            "M 8 22 C 8 -6 52 -6 52 24 C 52 50 24 66 4 98 C 16 84 36 108 56 88",
            "M 8 18 C 12 -6 50 -6 50 22 C 50 38 38 46 22 46 C 42 46 54 54 54 72 "
            "C 54 102 10 108 4 86",
            "M 40 100 L 40 0 L 2 64 C 22 70 40 70 60 66",
            "M 54 0 L 18 0 L 8 44 C 30 34 54 44 54 70 C 54 100 14 106 4 88",
            "M 50 0 C 24 6 6 40 6 70 v 30 100 h 54 70 v 32 42 h 6 70",
            "M 6 14 C 8 -4 24 6 56 0 C 40 30 24 62 22 100",
            "M 28 46 C 8 36 8 0 30 0 C 54 0 54 34 28 46 C -4 62 0 100 28 100 C 58 100 60 62 28 46",
            "M 8 100 C 34 94 54 60 54 30 v 30 0 h 6 30 v 28 58 h 54 30",
        ),
        slant=0.2,
        pen=(1.15, 0.85),
    ),
    # Only straight lines, with cut corners, 1 with a foot.
    "octagon": Face(
        (
            "M 16 0 L 40 0 L 56 18 L 56 82 L 40 100 L 16 100 L 0 82 L 0 18 L 16 0",
            "M 14 16 L 30 0 L 30 100 M 12 100 L 48 100",
            "M 0 20 L 16 0 L 40 0 L 56 18 L 56 36 L 0 88 L 0 100 L 56 100",
            "M 0 0 L 54 0 L 26 40 L 40 40 L 56 56 L 56 84 L 40 100 L 16 100 L 0 84",
            "M 40 100 L 40 0 L 0 56 L 0 70 L 58 70",
            "M 52 0 L 4 0 L 4 42 L 40 42 L 56 58 L 56 84 L 40 100 L 14 100 L 0 86",
            "M 50 0 L 34 0 L 0 40 L 0 84 L 16 100 L 40 100 L 56 84 L 56 60 L 40 44 L 16 44 L 0 60",
            "M 0 16 L 0 0 L 56 0 L 56 14 L 22 100",
            "M 16 46 L 4 34 L 4 14 L 16 0 L 40 0 L 52 14 L 52 34 L 40 46 L 16 46 "
            "L 0 62 L 0 86 L 16 100 L 40 100 L 56 86 L 56 62 L 40 46",
            "M 6 100 L 22 100 L 56 60 L 56 16 L 40 0 L 16 0 L 0 16 L 0 40 L 16 56 L 40 56 L 56 40",
        )
    ),
    # A wide face with a tall pen: thin stems, heavy bars, small upper bowls.
    "wide": Face(
        (
            "M 38 0 h 74 50 v 38 100 h 2 50 v 38 0",
            "M 16 22 C 28 18 38 10 40 0 L 40 100",
            "M 4 26 v 38 0 h 70 26 C 70 48 24 62 4 100 L 74 100",
            "M 8 16 v 38 0 h 66 22 v 40 44 L 26 44 M 40 44 h 74 72 v 38 100 h 2 78",
            "M 54 100 L 54 0 L 2 66 L 76 66",
            "M 66 0 L 14 0 L 8 46 C 18 38 28 36 38 36 h 74 68 v 38 100 h 2 82",
            "M 66 14 v 44 0 h 2 60 v 38 100 h 72 69 v 38 40 h 2 66",
            "M 2 0 L 74 0 L 28 100",
            "M 38 43 h 64 21 v 38 0 h 12 21 v 38 43 h 74 71 v 38 100 h 2 71 v 38 43",
            "M 8 86 v 30 100 h 72 40 v 36 0 h 2 31 v 36 60 h 72 34",
        ),
        pen=(0.9, 1.15),
    ),
}


def segments(face: Face, digit: int) -> np.ndarray:
    """Convert the glyph of a digit to n line segments, float64 (n, 2, 2), pairs of points (x, y).

    The glyph is one unit high and not slanted, and the origin is the centre of its bounding box.
    The computation uses only float64 sums, products and quotients, so every machine computes the
    same bits.
    """
    pairs = []
    tokens = face.glyphs[digit].split()
    pen = np.zeros(2)
    position = 0
    while position < len(tokens):
        command = tokens[position]
        count = 6 if command == "C" else 2
        points = np.array(tokens[position + 1 : position + 1 + count], np.float64).reshape(-1, 2)
        position += 1 + count
        if command == "L":
            pairs.append((pen, points[0]))
        elif command != "M":
            curve = _curve(command, pen, points, face.roundness)
            pairs.extend(zip(curve[:-1], curve[1:], strict=True))
        pen = points[-1]
    lines = np.array(pairs)
    middle = (lines.min(axis=(0, 1)) + lines.max(axis=(0, 1))) / 2
    return (lines - middle) / 100


def _curve(command, start, points, roundness):
    """Return STEPS + 1 points on a curve.

    `command` is "C", "h" or "v", and `points` are its arguments.
    """
    if command != "C":
        end = points[0]
        keep = np.array([0.0, 1.0] if command == "h" else [1.0, 0.0])
        first = start + roundness * (1 - keep) * (end - start)
        second = end - roundness * keep * (end - start)
        points = np.array([first, second, end])
    t = np.arange(STEPS + 1)[:, None] / STEPS
    s = 1 - t
    return (
        s * s * s * start
        + 3 * s * s * t * points[0]
        + 3 * s * t * t * points[1]
        + t * t * t * points[2]
    )
