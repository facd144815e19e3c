"""Run notebooks and store their outputs and pictures.

    python docs/run_notebooks.py                # all notebooks in docs/notebooks
    python docs/run_notebooks.py white_paper    # only the white paper, with all of its figures

If a cell has a tag "picture-NAME", its picture is also written to docs/pictures. The notebooks
start ranks with `dl.launch` and need `pip install 'mpidl[docs,plots,notebook]'`.
"""

import base64
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NOTEBOOKS, PICTURES = DOCS / "notebooks", DOCS / "pictures"
MINUTES = 30  # time limit per cell
WARNING = re.compile(r"^warning: .*\n?", re.M)  # printed on machines with too few cores


def execute(path):
    """Run a notebook in its folder, and return the notebook with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=60 * MINUTES,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return notebook


def strip(notebook):
    """Remove irrelevant differences between runs, and join consecutive parts of printed text."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            outputs = []
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    output.text = WARNING.sub("", output.text)
                    if not output.text.strip():
                        continue
                is_text = output.output_type == "stream"
                if is_text and outputs and outputs[-1].get("name") == output.name:
                    outputs[-1].text += output.text
                else:
                    outputs.append(output)
            cell.outputs = outputs
    notebook.metadata.pop("language_info", None)


def write_pictures(notebook):
    """Write the pictures of tagged cells, and return the paths of the pictures."""
    paths = []
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            pictures = [
                output.data["image/png"]
                for output in cell.get("outputs", [])
                if "image/png" in output.get("data", {})
            ]
            if tag.startswith("picture-") and pictures:
                path = PICTURES / f"{tag.removeprefix('picture-')}.png"
                path.write_bytes(base64.b64decode(pictures[-1]))
                paths.append(path)
    return paths


def main(names):
    notebooks = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    unknown = [name for name in names if name not in notebooks]
    if unknown:
        print(f"no notebook {unknown[0]}: expected one of {', '.join(notebooks)}", file=sys.stderr)
        return 2
    import nbformat

    for name in names or notebooks:
        notebook = execute(notebooks[name])
        strip(notebook)
        nbformat.write(notebook, notebooks[name])
        pictures = [path.name for path in write_pictures(notebook)]
        print(f"{name}: {len(notebook.cells)} cells; {', '.join(pictures) or 'no pictures'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
