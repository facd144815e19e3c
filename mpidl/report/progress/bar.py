"""The line at the bottom of a terminal that shows the progress of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from mpidl.report.progress.terminal import terminal_width

if TYPE_CHECKING:
    from rich.text import Text

MIN_BAR = 8  # minimum number of columns; fields are omitted if the bar would be shorter
SEPARATOR = "  "


class Field(NamedTuple):
    """A text next to the bar. Fields with a high `rank` are omitted first, and rank 0 is kept."""

    text: str
    rank: int = 0


class BottomLine:
    """A line of text that stays below all other output on a terminal of `width` columns."""

    def __init__(self, stream: TextIO, width: int) -> None:
        import rich.console
        import rich.live

        self.console: Any = rich.console.Console(file=stream, force_terminal=True, width=width)
        # The console decides when to draw, so no thread of rich competes with the computation.
        # Other output appears above the line, unless stdout is a file or a pipe.
        is_shown = stream is sys.stdout or terminal_width(sys.stdout) > 0
        self.live: Any = rich.live.Live(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=is_shown
        )
        self.live.start()
        self.console.show_cursor(True)  # a killed job could not show a hidden cursor again

    def draw(self, width: int, label: str, fraction: float | None, fields: Sequence[Field]) -> None:
        """Draw the line; see `compose` for the parameters."""
        self.console.width = width
        bar = "━━" if self.console.encoding.startswith("utf") else "#-"
        if bar == "━━" and (self.console.no_color or self.console.color_system is None):
            bar = "━ "  # otherwise only colours would distinguish the two parts
        self.live.update(compose(width, label, fraction, fields, bar), refresh=True)

    def print(self, text: str) -> None:
        """Print text above the line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the line."""
        self.live.stop()


def compose(
    width: int, label: str, fraction: float | None, fields: Sequence[Field], bar: str = "━━"
) -> Text:
    """Return a text of at most `width` columns, with a bar exactly `width`: the label, the bar
    filled to a fraction from 0 to 1 (None draws no bar), and the fields on the right. `bar` has the
    character of the filled part and that of the rest.
    """
    from rich.text import Text

    if fraction is None:
        return _cut(SEPARATOR.join(filter(None, [label, *(field.text for field in fields)])), width)
    fields = [field for field in fields if field.text]
    while True:
        right = "".join(SEPARATOR + field.text for field in fields)
        left = label + SEPARATOR if label else ""
        columns = width - len(left) - len(right)
        removable = max(fields, key=lambda field: field.rank, default=None)
        if columns >= MIN_BAR or removable is None or not removable.rank:
            break
        fields.remove(removable)
    if columns < 1:
        return _cut(label + right, width)
    filled = round(columns * min(max(fraction, 0.0), 1.0))
    parts = (bar[0] * filled, "cyan"), (bar[1] * (columns - filled), "bright_black")
    return Text.assemble(left, *parts, right, no_wrap=True, overflow="ellipsis")


def _cut(text, width):
    from rich.text import Text

    return Text(text[:width], no_wrap=True, overflow="ellipsis")
