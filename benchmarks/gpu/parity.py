"""Compare the ops on the GPU with NumPy in float64, in networks and for the table of cases.

A network computes a training step on the GPU, layer by layer. Each call of the backend is repeated
by the reference with the same numbers, so every kind of layer is compared, at its real size. Equal
layers are compared once. Errors are |a - b| / |b| in the Euclidean norm over the images of the
mini-batch. Functions that compute products are also called with TF32 products, in bfloat16, and
with the direct kernels. `check_table` runs the table of cases of the tests, which has every
function of the interface.
"""

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import mpidl_step, subject
from mpidl import losses, phases
from mpidl.backends import REFERENCE, settings
from mpidl.backends.interface import FUSED, HOST, Backend
from mpidl.comm.reducer import is_on_host
from mpidl.core.blocks import LANES, OneRank, share
from mpidl.core.fold import Late, Partial, merge_moments
from mpidl.core.grad import value_and_grad
from mpidl.core.values import BF16, as_type, is_device_array
from mpidl.data import ArrayDatastore, MinibatchQueue

COUNT = 20  # images, so that the last of two blocks is partly full
# Largest allowed errors. Products in float32, or as three TF32 products, differ only by rounding.
# Tensor cores may truncate each sum, which gives up to 3e-6. In bfloat16, both factors and some
# results are rounded, each by 1e-3 on average, and sums of them cancel in part.
EXACT, PRODUCTS, TF32, BFLOAT16 = 1e-6, 4e-6, 1e-3, 1e-2
# Ways to compute products: (name, precision, True to avoid tensor cores, largest error).
KINDS = (
    ("fp32", "fp32", False, PRODUCTS),
    ("tf32", "tf32", False, TF32),
    ("bf16", "bf16", False, BFLOAT16),
    ("direct", "fp32", True, PRODUCTS),
)
OF_PRODUCTS = ("conv2d", "conv2d_backward", "transposed_conv2d", "transposed_conv2d_backward")
OF_PRODUCTS += "dense", "dense_backward"
# Functions of a few numbers per channel and the functions that read the data set; the table of
# cases has them.
UNCOMPARED = {"statistics", "batchnorm_factors", "running", "predict_scale", "source"}
UNCOMPARED |= {"step_number", "reciprocal", "zeros_like", "from_numpy", "images"}


def check_network(report, world, title, net, count=COUNT, kinds=KINDS):
    """Compare all calls of a training step of a network with the reference.

    Parameters
    ----------
    report : Report
        Receives a check for each kind, and a table of the largest errors.
    world : World
        A world of one rank on a GPU.
    title : str
        Name of the network.
    net : Network
        The network.
    count : int
        Number of images in the mini-batch.
    kinds : tuple
        Ways to compute products, in the form of KINDS.
    """
    comparison, rows = Comparison(count, kinds), []
    with comparison:
        step(world, net, count)
    for kind, *_ in kinds:
        errors = comparison.errors[kind]
        failed = [name for name, (excess, *_) in errors.items() if not excess <= 1]
        rows += [[kind, name, f"{e:.1e}", place] for name, (_, e, place) in errors.items()]
        largest = max((error for _, error, _ in errors.values()), default=0.0)
        text = f"{len(errors)} functions, errors at most {largest:.1e}"
        text += f"; too large: {', '.join(failed)}" if failed else ""
        report.check(f"ops of {title}, {kind}", not failed, text)
    head = ["products", "function", "error", "in"]
    report.table(f"{title}: largest errors relative to float64 NumPy", head, rows)


def step(world, net, count=COUNT):
    """Compute a training step of a network on the GPU, on random images, one call at a time."""
    store = ArrayDatastore(*subject.mini_batch(net.input_shape, count))
    ((images, labels),) = MinibatchQueue(store, count, world=world, shuffle="never").epoch(0)
    net.fuse = False  # the reference has no fused functions
    net.to(world.device)
    try:
        with phases.named_places():
            result = value_and_grad(losses.cross_entropy)(net, images, labels)
            _, gradients, _ = result
            mpidl_step.optimizer()(net.parameters, world.gplus(gradients))
    finally:
        net.to(None)


class Comparison:
    """Compare each call of the GPU backend with the reference, within the `with` block.

    `errors` is {kind: {function: (error / largest allowed error, error, layer)}} with the largest
    errors. An error is infinite if a call of the reference fails.
    """

    def __init__(self, count, kinds=KINDS):
        self.count, self.counts = count, share(count, OneRank()).counts()
        self.kinds, self.compared = kinds, set()
        self.errors: dict[str, dict] = {kind: {} for kind, *_ in kinds}

    def __enter__(self):
        from mpidl.backends.gpu.backend import GPU

        self._originals = dict(vars(GPU))
        for name, function in self._originals.items():
            if callable(function) and name not in FUSED | HOST | UNCOMPARED:
                setattr(GPU, name, functools.partial(self._call, name, function))
        return self

    def __exit__(self, *_):
        from mpidl.backends.gpu.backend import GPU

        vars(GPU).update(self._originals)

    def _call(self, name, function, *arguments, **keywords):
        bound = _signature(name).bind(None, *arguments, **keywords).arguments
        key = name, repr(_described(dict(list(bound.items())[1:])))
        if key in self.compared:
            return function(*arguments, **keywords)
        self.compared.add(key)
        on_host = {n: self._on_host(n, v) for n, v in list(bound.items())[1:]}
        dy = on_host.get("dy")
        try:
            exact = getattr(REFERENCE, name)(**on_host)
        except Exception as error:  # the other functions are still compared
            exact, place = None, f"{phases.place()}: {type(error).__name__}: {error}"
            self.errors[self.kinds[0][0]][name] = np.inf, np.inf, place[:200]
        for kind, precision, direct, tolerance in self.kinds[1:]:
            if name in OF_PRODUCTS and exact is not None:
                with arithmetic(precision, direct):
                    self._compare(
                        kind, tolerance, name, function(*arguments, **keywords), exact, dy
                    )
        kind, precision, direct, tolerance = self.kinds[0]
        with arithmetic(precision, direct):
            result = function(*arguments, **keywords)
        if exact is not None:
            self._compare(kind, tolerance, name, result, exact, dy)
        return result

    def _compare(self, kind, tolerance, name, result, exact, dy):
        errors = _errors(result, exact, self.count)
        if name.endswith("_backward") and exact[2] is not None:
            # before a batch normalization, the gradient of the bias is only noise
            terms = np.linalg.norm(np.abs(dy).sum(tuple(n for n in range(dy.ndim) if n != 1)))
            errors[-1] = float(np.linalg.norm(_root(result[2]) - _root(exact[2])) / terms)
        error = max(errors, default=0.0)
        entry = error / (tolerance if name in OF_PRODUCTS else EXACT), error, phases.place()
        self.errors[kind][name] = max(entry, self.errors[kind].get(name, (-1.0, 0.0, "")))

    def _on_host(self, name, value):
        """Return an argument for the reference: float64 numbers on the host."""
        if name == "counts":
            return self.counts
        if isinstance(value, Late):
            return float(value)
        if is_device_array(value):
            array = value.numpy()
            if array.size == 1 and name in ("epoch", "scale", "numbers"):
                return array.item()
            return array.astype({"f4": np.float64, "i4": np.int32}.get(array.dtype.str[1:]))
        if isinstance(value, (list, tuple)):
            entries = [self._on_host(name, entry) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        return value


@functools.cache
def _signature(name):
    return inspect.signature(getattr(Backend, name))


def _described(value):
    """Return an argument with arrays replaced by their shapes and types."""
    if isinstance(value, dict):
        return {name: _described(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(entry) for entry in value]
    return (
        f"{value.shape} {value.dtype}"
        if hasattr(value, "dtype")
        else type(value).__name__
        if (isinstance(value, Late))
        else str(value)
    )


@contextlib.contextmanager
def arithmetic(precision: str, direct: bool) -> Iterator[None]:
    """Inside the `with` block, compute products with this precision, or with direct kernels."""
    original = settings.precision, settings.direct
    settings.precision, settings.direct = precision, direct
    try:
        yield
    finally:
        settings.precision, settings.direct = original


def _errors(value, exact, count):
    """Return the relative errors of all results of a function."""
    if isinstance(exact, (list, tuple)):
        pairs = zip(value, exact, strict=True)
        return [e for a, b in pairs if b is not None for e in _errors(a, b, count)]
    if isinstance(exact, Partial) and exact.terms[0].combine is merge_moments:
        return _errors_of_moments(_root(value), _root(exact))
    value = as_type(value, np.dtype(np.float32)) if value.dtype == BF16 else value
    value, exact = (_root(v) if isinstance(v, Partial) else np.asarray(v) for v in (value, exact))
    if exact.ndim > 1 and exact.shape[-1] == LANES and len(exact) == -(-count // LANES):
        value, exact = (
            np.moveaxis(a, -1, 1).reshape(-1, *a.shape[1:-1])[:count] for a in (value, exact)
        )
    if value.shape != exact.shape:
        raise ValueError(f"expected shape {exact.shape}, found {value.shape}")
    return [relative(value, exact)]


def relative(value, exact):
    """Return |value - exact| / |exact|, or infinity if a number is not finite."""
    size = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(value.astype(np.float64) - exact)) / (size or 1.0)
    return error if np.isfinite(error) else np.inf


def _errors_of_moments(value, exact):
    """Return the errors of the count, the means (in standard deviations) and M2."""
    channels = exact.size // 2
    deviation = np.sqrt(exact[1 + channels :] / exact[0])
    means = (value - exact)[1 : 1 + channels] / np.maximum(deviation, 1e-30)
    return [
        abs(value[0] - exact[0]),
        float(abs(means).max()),
        relative(value[1 + channels :], exact[1 + channels :]),
    ]


def _root(partial):
    """Return the sum of a Partial of one rank as a NumPy array."""
    from mpidl.backends.gpu import sums

    if not is_on_host(partial):
        total = sums.total_of_one_rank("", partial)
        return np.asarray(float(total) if partial.shape == () else total)
    return np.asarray(OneRank().gplus(partial))


# the table of cases


def tests_folder() -> str:
    """Return the path of the checkout's folder `tests`."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.path.join(root, "tests")


def table(each_function_once: bool = False) -> list[tuple[Any, dict]]:
    """Return the GPU's cases of the tests' table, each with the settings to apply.

    Parameters
    ----------
    each_function_once : bool
        Whether to return only the first case of each function.
    """
    for folder in ("support", "backends"):
        path = os.path.join(tests_folder(), folder)
        if path not in sys.path:
            sys.path.append(path)
    cases = [c for c in importlib.import_module("cases").CASES if "gpu" in c.backends]
    if each_function_once:
        cases = list({case.function: case for case in reversed(cases)}.values())
    return [(case, values) for case in cases for values in case.settings.get("gpu", ({},))]


def run_table(rows, check: Callable) -> list[str]:
    """Call check(case) for each row of `table`. Return a message for each call that fails."""
    failed = []
    for case, values in rows:
        before = dict(vars(settings))
        vars(settings).update(values)
        try:
            check(case)
        except Exception as error:  # the other cases still run
            text = " ".join(str(error).split())[:160]
            failed.append(f"{case}: {type(error).__name__} {text}")
        finally:
            vars(settings).update(before)
    return failed


def gpu_results(case):
    """Return the results of a case on the GPU."""
    from mpidl.backends.gpu.backend import GPU

    return importlib.import_module("conformance").results(case, GPU)


def check_table(report, rows):
    """Compare the rows of `table` with the reference, as the tests do."""

    def check(case):
        importlib.import_module("conformance").assert_near(case, gpu_results(case))

    with np.errstate(all="ignore"):  # some cases have NaN and infinities
        failed = run_table(rows, check)
    functions = {case.function for case, _ in rows}
    text = f"{len(rows)} cases of {len(functions)} functions, {len(failed)} failed"
    report.check("every op", not failed, "; ".join([text, *failed[:5]]))
    if failed:
        cells = [text.split(": ", 1) for text in failed]
        report.table("Cases of the table that fail", ["case", "found"], cells)
