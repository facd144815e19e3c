"""Test that the tables in docs/options.md match the declarations of the options.

To update the tables, run `python tests/training/options/test_options_page.py`.
"""

import inspect
import re
import sys
import typing
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "options.md"
TABLE = re.compile(r"<!-- options of (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.S)
HEAD = "| option | default | MATLAB | description |\n|---|---|---|---|"


def tables():
    """Return {part of TrainingOptions: text of its table}."""
    from mpidl.options.declaration import rule_of
    from mpidl.training.optimizers.solvers import help_text, shown_default
    from mpidl.training.options.training_options import OPTIONS, flag

    names, parts = list(OPTIONS), {"steps": "epochs", "images": "shuffle", "run": "device"}
    starts = [names.index(first) for first in parts.values()]
    pairs = zip(starts, [*starts[1:], len(names)], strict=True)
    names = {part: names[i:j] for part, (i, j) in zip(parts, pairs, strict=True)}

    def row(name):
        facts = OPTIONS[name].metadata
        values = ", ".join(f"`{choice}`" for choice in rule_of(OPTIONS[name]).choices)
        text = help_text(OPTIONS[name]) + (f" ({values})" if values else "")
        matlab = f"`{facts['matlab']}`" if facts["matlab"] else ""
        return f"| `{flag(name)}` | {shown_default(OPTIONS[name])} | {matlab} | {text} |"

    return {part: "\n".join([HEAD, *map(row, group)]) for part, group in names.items()}


def test_the_page_has_every_option_as_it_is_defined():
    written = dict(TABLE.findall(PAGE.read_text()))
    expected = tables()
    assert list(written) == list(expected)
    for part, text in expected.items():
        assert written[part] == text, f"run python {Path(__file__).name} to update the tables"


def test_help_texts_are_phrases_that_end_without_a_full_stop():
    from mpidl.training.options.training_options import OPTIONS

    for name, declared in OPTIONS.items():
        text = declared.metadata["help"]
        assert text[0].isupper() or text[0].isdigit(), name
        assert not text.endswith(".") and "%" not in text, name


def literals(annotation):
    """Return the values of all `Literal` types in an annotation."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return list(arguments)
    return [value for argument in arguments for value in literals(argument)]


def test_annotations_have_the_choices_and_defaults_of_the_rules():
    from mpidl import TrainingOptions
    from mpidl.options.declaration import rule_of
    from mpidl.training.options.training_options import OPTIONS

    parameters = inspect.signature(TrainingOptions).parameters
    assert str(parameters["epochs"]) == "epochs: int = 30"
    for name, declared in OPTIONS.items():
        rule = rule_of(declared)
        assert not isinstance(declared.type, str), name
        if not rule.pattern:
            assert literals(declared.type) == list(rule.choices), name
        assert parameters[name].default == declared.default, name
        assert f"    {name} : " in TrainingOptions.__doc__, name


def test_every_row_of_matlabs_options_has_a_name():
    """Each option in MATLAB's table "trainNetwork and trainingOptions" has a counterpart."""
    from mpidl.training.options.training_options import OPTIONS

    names = " ".join(declared.metadata["matlab"] for declared in OPTIONS.values())
    for name in (
        *("solverName", "InitialLearnRate", "Momentum", "GradientDecayFactor"),
        *("SquaredGradientDecayFactor", "Epsilon", "LearnRateSchedule", "LearnRateDropFactor"),
        *("LearnRateDropPeriod", "L2Regularization", "GradientThreshold"),
        *("GradientThresholdMethod", "MaxEpochs", "MiniBatchSize", "Shuffle", "Verbose"),
        *("VerboseFrequency", "Plots", "ValidationFrequency", "ValidationPatience"),
        *("ExecutionEnvironment", "WorkerLoad", "DispatchInBackground", "CheckpointFrequency"),
        *("BatchNormalizationStatistics", "OutputNetwork"),
    ):
        assert name in names.replace(",", " ").split(), name


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
