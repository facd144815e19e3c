"""Build HTML and SVG from elements. All text is escaped when the page is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpidl.text import printable

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

Content: TypeAlias = "Element | str | None"


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

    policy = "default-src 'none'; style-src 'unsafe-inline'"
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
