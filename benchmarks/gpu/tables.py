"""The tables of the timing, as (title, head, rows of texts)."""

from benchmarks import machine
from benchmarks.gpu import floors
from benchmarks.gpu.report import milliseconds

MOST = 24  # kernels in a table; the others in one row


def medians(result):
    """{(side, variant, precision): median milliseconds}."""
    return {key: machine.median(times) for key, times in result.ms.items()}


def best(result, precision):
    """(variant, milliseconds) of the fastest of PyTorch's of a precision, or (None, None)."""
    theirs = {
        k[1]: ms for k, ms in medians(result).items() if (k[0], k[2]) == ("theirs", precision)
    }
    variant = min(theirs, key=theirs.get, default=None)
    return variant, theirs.get(variant)


def steps(results, rate):
    """Our step against the fastest of PyTorch's in the same precision, and against its floor."""
    head = ["step", "precision", "ours, ms", "floor, ms", "ours / floor", "TFLOP/s", "GB/s"]
    head += ["PyTorch, ms", "PyTorch / ours", "PyTorch bf16, ms"]
    rows = []
    for result in results:
        for (kind, variant, precision), times in result.ms.items():
            if (kind, variant) != ("ours", "graphs"):
                continue
            ms = machine.median(times)
            name, theirs = best(result, precision)
            half, at_half = best(result, "bf16")
            floor, outputs = None, 4 * result.work.outputs * result.batch
            if rate is not None:
                floor = floors.milliseconds(result.work, result.batch, rate, precision)
            rows.append(
                [
                    result.name,
                    precision,
                    f"**{milliseconds(ms)}** ({milliseconds(min(times))} to "
                    f"{milliseconds(max(times))})",
                    "" if floor is None else _floor(floor),
                    "" if floor is None else f"{ms / floor['floor']:.2f}",
                    f"{result.work.flop * result.batch / ms / 1e9:.1f}",
                    f"{floors.FUSED * outputs / ms / 1e6:.0f}",
                    "" if name is None else f"{milliseconds(theirs)} ({name})",
                    "" if name is None else f"**{theirs / ms:.2f}**",
                    "" if half is None else f"{milliseconds(at_half)} ({half})",
                ]
            )
    return "Training step: forward, backward and SGD with momentum", head, rows


def _floor(found):
    return (
        f"{milliseconds(found['floor'])} (products {milliseconds(found['products'])}, bytes "
        f"{milliseconds(found['bytes fused'])} to {milliseconds(found['bytes apart'])})"
    )


def variants(results):
    """All that was timed, in ms: a row each, a column for each step."""
    keys = list(dict.fromkeys(key for result in results for key in result.ms))
    keys.sort(key=lambda key: (key[2] != "fp32", key[2] != "tf32", key[0] == "theirs"))
    found = [medians(result) for result in results]
    names = {"ours": "ours", "theirs": "PyTorch"}
    rows = [
        [key[2], f"{names[key[0]]}, {key[1]}", *(milliseconds(of.get(key)) for of in found)]
        for key in keys
    ]
    head = ["precision", "", *(result.name for result in results)]
    return "All variants, ms a step (medians)", head, rows


def kernels(result):
    """Our kernels by time. bytes: of the arrays that a kernel is given, each once."""
    total = sum(row["ms"] for row in result.kernels)
    rows = [_kernel(row, total) for row in result.kernels[:MOST]]
    others = result.kernels[MOST:]
    if others:
        rest = {k: sum(row[k] for row in others) for k in ("times", "ms", "bytes", "flop")}
        rows.append(_kernel({"name": f"{len(others)} others", "shape": "", **rest}, total))
    head = ["kernel", "largest arrays", "launches", "µs", "share", "GB/s", "TFLOP/s"]
    title = (
        f"{result.name}, fp32: kernels by time, {total * 1e3:.0f} µs in all, each between events "
        "of its own"
    )
    return title, head, rows


def _kernel(row, total):
    ms = max(row["ms"], 1e-9)
    return [
        row["name"],
        row["shape"],
        str(row["times"]),
        f"{row['ms'] * 1e3:.1f}",
        f"{row['ms'] / max(total, 1e-9) * 100:.1f} %",
        f"{row['bytes'] / ms / 1e6:.0f}",
        f"{row['flop'] / ms / 1e9:.1f}" if row["flop"] else "",
    ]
