"""Replace the line `{rest}` in a toctree with the pages of docs/ that no toctree lists.

A new page therefore appears on the site without an edit of any toctree.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.M | re.S)


def listed_pages():
    """Return the names of the pages in any toctree in docs/, and of the root page."""
    names = {"index"}
    for path in DOCS.glob("*.md"):
        for entries in TOCTREE.findall(path.read_text()):
            names |= {Path(line.rpartition("<")[2].rstrip(">")).stem for line in entries.split()}
    return names


def fill(app, docname, source):
    if "\n{rest}\n" in source[0]:
        rest = sorted({path.stem for path in DOCS.glob("*.md")} - listed_pages())
        source[0] = source[0].replace("\n{rest}\n", "\n" + "\n".join(rest) + "\n")


def setup(app):
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
