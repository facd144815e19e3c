"""docs/options.md has every option, as it is defined.

`python tests/test_options_page.py` writes its tables anew.
"""

import re
import sys
from dataclasses import fields
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
TABLE = re.compile(r"<!-- options of (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.S)
HEAD = "| option | default | MATLAB | what |\n|---|---|---|---|"


def tables():
    """{part: text of its table}, of the parts that TrainingOptions is made of."""
    from mpidl.training.options.image_options import ImageOptions
    from mpidl.training.options.solver_options import SolverOptions
    from mpidl.training.options.training_options import BY_SOLVER, OPTIONS, flag

    parts = {"steps": SolverOptions, "images": ImageOptions}
    names = {part: [f.name for f in fields(kind)] for part, kind in parts.items()}
    known = [name for group in names.values() for name in group]
    names["run"] = [name for name in OPTIONS if name not in known]

    def row(name):
        facts, default = OPTIONS[name].metadata, OPTIONS[name].default
        values = ", ".join(f"`{choice}`" for choice in facts["rule"].choices)
        text = facts["help"] + (f" ({values})" if values else "")
        if name in BY_SOLVER:
            default = ", ".join(f"{value:g} ({s})" for s, value in BY_SOLVER[name].items())
        matlab = f"`{facts['matlab']}`" if facts["matlab"] else ""
        return f"| `{flag(name)}` | {'none' if default is None else default} | {matlab} | {text} |"

    return {part: "\n".join([HEAD, *map(row, group)]) for part, group in names.items()}


def test_the_page_has_every_option_as_it_is_defined():
    found = dict(TABLE.findall(PAGE.read_text()))
    expected = tables()
    assert list(found) == list(expected)
    for part, text in expected.items():
        assert found[part] == text, f"python {Path(__file__).name} writes the tables anew"


def test_every_row_of_matlabs_options_has_a_name():
    """Those of its table "trainNetwork and trainingOptions"."""
    from mpidl.training.options.training_options import OPTIONS

    known = " ".join(known.metadata["matlab"] for known in OPTIONS.values())
    for name in (
        *("solverName", "InitialLearnRate", "Momentum", "GradientDecayFactor"),
        *("SquaredGradientDecayFactor", "Epsilon", "LearnRateSchedule", "LearnRateDropFactor"),
        *("LearnRateDropPeriod", "L2Regularization", "GradientThreshold"),
        *("GradientThresholdMethod", "MaxEpochs", "MiniBatchSize", "Shuffle", "Verbose"),
        *("VerboseFrequency", "Plots", "ValidationFrequency", "ValidationPatience"),
        *("ExecutionEnvironment", "WorkerLoad", "DispatchInBackground", "CheckpointFrequency"),
        *("BatchNormalizationStatistics", "OutputNetwork"),
    ):
        assert name in known.replace(",", " ").split(), name


def main():
    text = PAGE.read_text()
    for part, table in tables().items():
        head = f"<!-- options of {part} -->\n\n"
        start = text.index(head) + len(head)
        text = text[:start] + table + text[text.index("\n\n<!-- end -->", start) :]
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1]))
    main()
