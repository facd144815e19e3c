"""The counts of house.py, and the number of vague names in the package."""

import house

SOURCE = '''"""A docstring,
of two lines."""

import numpy as kept  # an alias


def what(how, *, given=1):
    """Another one."""
    # a comment
    found = [at for at in how]

    self.whole = found
    names, _seen = found, (
        given
    )
    return names
'''


def test_vague_bindings_are_counted():
    names = [name for _, name in house.vague_bindings(SOURCE)]
    assert sorted(names) == sorted("kept what how given found at whole _seen".split())


def test_lines_of_code_are_counted(tmp_path):
    python, c = tmp_path / "a.py", tmp_path / "a.c"
    python.write_text(SOURCE)
    assert house.code_lines(python) == 8
    c.write_text("/* a\n   comment */\nint x; // why\n\n// alone\nint y; /* b */\n")
    assert house.code_lines(c) == 2


def test_the_package_has_few_vague_names():
    paths = [path for path in house.sources(house.ROOT) if path.suffix == ".py"]
    bindings = [
        f"{path.relative_to(house.ROOT)}:{line}: {name}"
        for path in paths
        if path.relative_to(house.ROOT).parts[0] in ("mpidl", "kernels", "benchmarks")
        for line, name in house.vague_bindings(path.read_text())
    ]
    assert len(bindings) < 50, "\n".join(bindings)
