"""Check that each internal link of a built site leads to an existing file and anchor.

    python docs/extensions/check_links.py FOLDER

Links to other sites are not followed. The program prints a line for each broken link. If there are
broken links, the exit code is 1.
"""

import functools
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SOURCES = {"a": "href", "link": "href", "img": "src", "script": "src", "object": "data"}


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        target = values.get(SOURCES.get(tag, ""))
        if target:
            self.links.append(target)


@functools.cache
def page_of(path):
    return Page(path.read_text())


def problem_of(page, target):
    """Return a description of the problem with a link of a page, or None."""
    parts = urlsplit(target)
    if parts.scheme:
        return None
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    path = path / "index.html" if path.is_dir() else path
    if not path.is_file():
        return "no such file"
    if path.suffix == ".html" and unquote(parts.fragment) not in page_of(path).anchors:
        return "no such anchor"
    return None


def broken_links(folder):
    """Return a line for each broken link of the pages in a folder, and the number of all links."""
    lines, count = [], 0
    pages = folder.resolve().rglob("*.html")
    for page in sorted(path for path in pages if "_static" not in path.parts):
        links = {link for link in page_of(page).links if not urlsplit(link).netloc}
        count += len(links)
        for target in sorted(links):
            problem = problem_of(page, target)
            if problem:
                lines.append(f"{page.relative_to(folder.resolve())}: {target}: {problem}")
    return lines, count


def main():
    folder = Path(sys.argv[1])
    lines, count = broken_links(folder)
    print("\n".join([*lines, f"{count} internal links and pictures, {len(lines)} broken"]))
    return 1 if lines or not count else 0


if __name__ == "__main__":
    sys.exit(main())
