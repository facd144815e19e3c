"""Show a block of MATLAB and the following block of Python or commands side by side."""

from docutils import nodes
from sphinx.transforms import SphinxTransform

TITLES = {"matlab": "MATLAB", "python": "mpidl", "sh": "mpidl"}


class SideBySide(SphinxTransform):
    """A transform that puts each pair of MATLAB and mpidl blocks into two columns."""

    default_priority = 500

    def apply(self):
        for block in list(self.document.findall(nodes.literal_block)):
            siblings = block.parent.children
            if block not in siblings:
                continue  # the second block of a pair
            position = siblings.index(block)
            follower = siblings[position + 1] if position + 1 < len(siblings) else None
            is_pair = block.get("language") == "matlab" and isinstance(
                follower, nodes.literal_block
            )
            if is_pair and follower.get("language") in ("python", "sh"):
                pair = nodes.container(classes=["side-by-side"])
                for half in (block, follower):
                    column = nodes.container(classes=["column"])
                    title = nodes.paragraph(text=TITLES[half["language"]], classes=["column-title"])
                    column += [title, half.deepcopy()]
                    pair += column
                block.parent.replace(block, pair)
                pair.parent.remove(follower)


def setup(app):
    app.add_transform(SideBySide)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
