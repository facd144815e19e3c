"""The options and the inputs of a run as texts, as on the command line, and options from texts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import UserError
from mpidl.options.declaration import check_value, flag, rule_of
from mpidl.training.options.run_inputs import EMBEDDED
from mpidl.training.options.training_options import OPTIONS, TrainingOptions

if TYPE_CHECKING:
    from mpidl.training.run import Run

AUGMENTER = "augmenter"  # the option of Python; its text is JSON
PRIVATE = ("certify_key", "track")  # options with paths
# Inputs with paths or URLs, of which a certificate keeps the names that are not paths.
DATA = ("data", "test_data", "validation_data")
PLACES = ("weights", "endpoint_url", "requests", "cache_dir", "retry_seconds")
PLACES += ("upload", "mlflow", "wandb")
FUNCTION = "function "  # begins the text of an option that is a Python function


def text_of(value: Any) -> str:
    """Return the text of an option's value on the command line."""
    return "none" if value is None else str(value)


def options_of(options: TrainingOptions) -> dict[str, str]:
    """Return {name: text} of the options of a run, without those that have paths."""
    values = {n: value for n, value in options.as_dict().items() if n not in PRIVATE}
    texts = {name: text_of(value) for name, value in values.items()}
    if options.augmenter is not None:
        texts[AUGMENTER] = json.dumps(options.augmenter.spec(), sort_keys=True)
    return texts


def value_of(name: str, text: str) -> Any:
    """Return the value of an option from its text; raise UserError if it is invalid."""
    return check_value(rule_of(OPTIONS[name]), text, flag(name), text=True)


def options_from(texts: Mapping[str, str], **replaced: Any) -> TrainingOptions:
    """Return the options that texts describe; the inverse of `options_of`.

    `replaced` has values instead of texts, such as a function. Raises UserError if the name or the
    value of an option is invalid.
    """
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name in replaced:
            continue
        if name == AUGMENTER:
            values[name] = _augmenter(text)
            continue
        if name not in OPTIONS:
            raise UserError(
                f"unknown option {name:.50} in the certificate: install the mpidl that wrote it"
            )
        if text.startswith(FUNCTION):
            raise UserError(f"{flag(name)}: expected the {text:.100}, which Python programs pass")
        values[name] = value_of(name, text)
    return TrainingOptions(**values, **replaced)


def _augmenter(text):
    try:
        spec = json.loads(text)
        return Augmenter(**{name: _tuples(value) for name, value in spec.items()})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"augmenter: expected the parameters of an Augmenter: {error}") from None


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def inputs_of(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: text} of the inputs of the command `train`, without paths.

    The path before the name of a network's function is left out.
    """
    texts = {}
    for name, value in inputs.items():
        if name in PLACES or (name in DATA and value not in (*EMBEDDED, "test", None)):
            continue
        texts[name] = os.path.basename(text_of(value)) if name == "network" else text_of(value)
    return texts


def custom_parts(trainer: Run) -> list[str]:
    """Return the names of a run's hooks and output functions that are not parts of mpidl."""
    names, functions = [], trainer.options.output_functions
    for part in [*trainer.hooks.all, *(functions if isinstance(functions, tuple) else ())]:
        kind = part if hasattr(part, "__qualname__") else type(part)
        if not kind.__module__.startswith("mpidl."):
            names.append(f"{kind.__module__}.{kind.__qualname__}")
    return names
