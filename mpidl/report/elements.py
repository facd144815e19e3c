"""Build HTML and SVG from elements. All text is escaped when the page is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpidl.text import printable

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

Content: TypeAlias = "Element | str | None"
STYLE = """
:root { color-scheme: light; --line: #d9dde3; --soft: #f4f6f8; --ink: #1c2430; --dim: #5c6773; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 34px 0 10px; }
h3 { font-size: 1rem; margin: 18px 0 6px; }
p { margin: 4px 0 10px; color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
.numbers td { white-space: nowrap; }
.numbers td, .numbers thead th { text-align: right; }
.numbers td:nth-child(2), .numbers thead th:nth-child(-n+2) { text-align: left; }
thead th { color: var(--dim); font-weight: 600; }
tbody th { font-weight: 600; white-space: nowrap; }
td.best { font-weight: 700; }
tr.differs th, tr.differs td { background: #fff3cd; }
.options td, .options th { padding-left: 8px; }
.confusion td { text-align: right; padding: 3px 8px; border: 1px solid #fff; min-width: 34px; }
.confusion th { padding: 3px 8px; border-bottom: 0; white-space: nowrap; }
.confusion thead th { text-align: right; }
.confusion th { max-width: 130px; overflow: hidden; text-overflow: ellipsis; }
.dark { color: #fff; }
.hash { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; word-break: break-all; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 22px 28px; }
figure { break-inside: avoid; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 0; font-size: 13px; color: var(--dim); }
figcaption b { color: var(--ink); font-size: 14px; }
svg { height: auto; display: block; }
details summary { cursor: pointer; color: var(--dim); margin: 8px 0; }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; }
  table, figure { break-inside: avoid; } .wide { overflow: visible; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def element(tag: str, *children: Content, **attributes: str) -> Element:
    """Return an element with these children; strings become text, and None is skipped.

    Characters that cannot be printed are escaped. An underscore at the end of an attribute's name
    is removed, and other underscores become dashes: `class_` is class, and `text_anchor` is
    text-anchor.
    """
    from xml.etree.ElementTree import Element  # most ranks write no page

    node = Element(tag)
    for name, value in attributes.items():
        node.set(name.rstrip("_").replace("_", "-"), printable(value))
    for child in children:
        if child is None:
            continue
        if not isinstance(child, str):
            node.append(child)
        elif len(node):
            node[-1].tail = (node[-1].tail or "") + printable(child)
        else:
            node.text = (node.text or "") + printable(child)
    return node


def table(
    head: Sequence[Content], rows: Iterable[Sequence[Content]], class_: str = "numbers"
) -> Element:
    """Return a table that scrolls on a narrow screen. The first cell of each row is its heading.

    A cell that is a `td` or `th` element is used unchanged.
    """
    body = element("tbody", *(element("tr", *_cells(row)) for row in rows))
    is_empty = all(text == "" for text in head)
    top = None if is_empty else element("thead", element("tr", *(_cell("th", t) for t in head)))
    return element("div", element("table", top, body, class_=class_), class_="wide")


def _cells(row):
    return [_cell("th" if i == 0 else "td", content) for i, content in enumerate(row)]


def _cell(tag, content):
    if getattr(content, "tag", None) in ("td", "th"):
        return content
    return element(tag, content)


def page(title: str, style: str, *sections: Content) -> bytes:
    """Return a complete HTML page that loads no other file and runs no script."""
    from xml.etree import ElementTree

    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
    )
    sheet = ElementTree.Element("style")
    sheet.text = style
    head.append(sheet)
    root = element("html", head, element("body", element("main", *sections)), lang="en")
    text = ElementTree.tostring(root, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n".encode()
