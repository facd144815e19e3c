"""Convert notebooks to pages, with their text, code and stored outputs.

Building the site does not run notebooks. `docs/run_notebooks.py` runs them and stores the outputs.
"""

import json
import re

from myst_parser.parsers.sphinx_ import MystParser

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def fence(language, text):
    """Return a fenced block, with a fence that is longer than any fence in the text."""
    marks = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def output_blocks(output):
    """Return the Markdown blocks of one output of a cell."""
    if output["output_type"] == "stream":
        text = ESCAPES.sub("", "".join(output["text"]))
        lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
        return [fence("text", "\n".join(lines))] if text.strip() else []
    if output["output_type"] == "error":
        return [fence("text", f"{output['ename']}: {output['evalue']}")]
    content = output["data"]
    if "image/png" in content:
        picture = "".join(content["image/png"]).replace("\n", "")
        return [f"![output of the cell](data:image/png;base64,{picture})"]
    return [fence("text", "".join(content["text/plain"]))]


def markdown_of(source):
    """Convert the JSON of a notebook to Markdown."""
    blocks = []
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(text)
        elif cell["cell_type"] == "code" and text.strip():
            blocks.append(fence("python", text))
            for output in cell["outputs"]:
                blocks += output_blocks(output)
    return "\n\n".join(blocks) + "\n"


class NotebookParser(MystParser):
    """A parser that converts a notebook to Markdown and parses the Markdown."""

    supported = ("notebook",)

    def parse(self, inputstring, document):
        super().parse(markdown_of(inputstring), document)


def setup(app):
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
