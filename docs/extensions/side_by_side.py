"""Show a program of another tool and the block that follows it side by side.

A block of MATLAB and the following block of Python or commands are a pair. So are a block in `py`,
the language of programs for other Python libraries, and the following block of Python or MATLAB.
The first line of a `py` block is a comment, which is the title of its column.
"""

from docutils import nodes
from sphinx.transforms import SphinxTransform

TITLES = {"matlab": "MATLAB", "python": "mpidl", "sh": "mpidl"}
PAIRS = {"matlab": ("python", "sh"), "py": ("python", "matlab")}


class SideBySide(SphinxTransform):
    """A transform that puts each pair of blocks into two columns."""

    default_priority = 500

    def apply(self):
        for block in list(self.document.findall(nodes.literal_block)):
            siblings = block.parent.children
            if block not in siblings:
                continue  # the second block of a pair
            position = siblings.index(block)
            follower = siblings[position + 1] if position + 1 < len(siblings) else None
            languages = PAIRS.get(block.get("language"), ())
            if isinstance(follower, nodes.literal_block) and follower.get("language") in languages:
                pair = nodes.container(classes=["side-by-side"])
                pair += [column_of(half) for half in (block, follower)]
                block.parent.replace(block, pair)
                pair.parent.remove(follower)


def column_of(block):
    """Return a column with the block below its title."""
    column, block = nodes.container(classes=["column"]), block.deepcopy()
    title = TITLES.get(block["language"])
    if title is None:
        comment, _, program = block.astext().partition("\n")
        title = comment.removeprefix("# ")
        block = nodes.literal_block(program, program, **block.attributes)
    column += [nodes.paragraph(text=title, classes=["column-title"]), block]
    return column


def setup(app):
    app.add_transform(SideBySide)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
