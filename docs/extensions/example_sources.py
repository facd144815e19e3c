"""Show the source of each example below its link in docs/gallery.md, in a part that unfolds.

The file of the page has only the links, because a repository view shows the examples themselves.
"""

import re

# A paragraph that begins with a link to an example.
LINK = re.compile(r"^\[examples/(\w+)\.py\]\(.*(?:\n.+)*", re.M)
SOURCE = r"""\g<0>

<details><summary>Source</summary>

```{literalinclude} ../examples/\1.py
:language: python
```

</details>"""


def fill(app, docname, source):
    if docname == "docs/gallery":
        source[0] = LINK.sub(SOURCE, source[0])


def setup(app):
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
