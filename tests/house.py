"""Count vague names and lines of code.

    python tests/house.py [FOLDER]      count in this checkout, or in the checkout FOLDER

A name should say what its value is. The names in VAGUE do not. The script counts bindings
(assignments, parameters, loop variables, import aliases) to vague names. Lines of code exclude
docstrings, comments and blank lines.
"""

import ast
import collections
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VAGUE = frozenset(
    """
    about again ahead alone asked at began behind beside chosen done each ended every
    far found given gone held here how kept known least made many mine more most
    much named needed no of off often once one others own said same seen shown some
    such taken that theirs then there these they thing things this those told under wanted
    what when where which who whole why with without wrong
    """.split()
)
FOLDERS = ("mpidl", "kernels", "benchmarks", "tests")
SOURCES = {".py", ".c", ".h", ".cu", ".cuh", ".cpp"}


def vague_bindings(source):
    """Return (line, name) of each binding of a vague name in Python source."""
    bindings = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bindings.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            bindings.append((node.lineno, node.arg))
        elif isinstance(node, ast.alias) and node.asname:
            bindings.append((node.lineno, node.asname))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bindings.append((node.lineno, node.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bindings.append((node.lineno, node.name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            bindings.append((node.lineno, node.attr))
    return sorted((line, name) for line, name in bindings if name.lstrip("_").lower() in VAGUE)


def code_lines(path):
    """Count the lines of a source file that contain code."""
    text = path.read_text()
    if path.suffix != ".py":
        text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
        return sum(1 for line in text.splitlines() if line.partition("//")[0].strip())
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(value.lineno, value.end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def sources(root):
    """Return the source files of a checkout."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*")))
    return [path for path in paths if path.suffix in SOURCES and "__pycache__" not in path.parts]


def main():
    root = Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT
    words, files, lines = collections.Counter(), collections.Counter(), collections.Counter()
    for path in sources(root):
        name = path.relative_to(root)
        lines[name.parts[0]] += code_lines(path)
        if path.suffix == ".py":
            vague = [word for _, word in vague_bindings(path.read_text())]
            words.update(vague)
            files[str(name)] += len(vague)
    print(f"lines of code: {sum(lines.values())} ({dict(lines)})")
    print(f"bindings to names that say nothing: {sum(words.values())}")
    for counts in (words, files):
        print("  " + ", ".join(f"{key} {n}" for key, n in counts.most_common(25) if n))


if __name__ == "__main__":
    main()
