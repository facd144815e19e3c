"""Build the tables of the GPU timing as (title, head, rows of strings)."""

from benchmarks.gpu import floors
from benchmarks.report import median, milliseconds

ROWS = 24  # number of kernels in a table; all other kernels share one row


def medians(result):
    """Return {(side, variant, precision): median milliseconds}."""
    return {key: median(times) for key, times in result.ms.items()}


def best(result, precision):
    """Return (variant, ms) of PyTorch's fastest variant at a precision, or (None, None)."""
    torch = {k[1]: ms for k, ms in medians(result).items() if (k[0], k[2]) == ("theirs", precision)}
    variant = min(torch, key=torch.get, default=None)
    return variant, torch.get(variant)


def steps(results, rate):
    """Return the table of our step, PyTorch's fastest step of the same precision, and the floor."""
    head = ["step", "precision", "ours, ms", "floor, ms", "ours / floor", "TFLOP/s", "GB/s"]
    head += ["PyTorch, ms", "PyTorch / ours"]
    rows = []
    for result in results:
        for (kind, variant, precision), times in result.ms.items():
            if (kind, variant) != ("ours", "graphs"):
                continue
            ms = median(times)
            name, torch_ms = best(result, precision)
            floor = None
            outputs = floors.bytes_of_outputs(result.work, result.batch, precision)
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
                    "" if name is None else f"{milliseconds(torch_ms)} ({name})",
                    "" if name is None else f"**{torch_ms / ms:.2f}**",
                ]
            )
    return "Training step: forward, backward and SGD with momentum", head, rows


def _floor(floor):
    return (
        f"{milliseconds(floor['floor'])} (products {milliseconds(floor['products'])}, bytes "
        f"{milliseconds(floor['bytes fused'])} to {milliseconds(floor['bytes apart'])})"
    )


def variants(results):
    """Return the table of all times in ms, with a row per variant and a column per step."""
    keys = list(dict.fromkeys(key for result in results for key in result.ms))
    keys.sort(key=lambda key: (key[2] != "fp32", key[2] != "tf32", key[0] == "theirs"))
    columns = [medians(result) for result in results]
    names = {"ours": "ours", "theirs": "PyTorch"}
    rows = [
        [key[2], f"{names[key[0]]}, {key[1]}", *(milliseconds(ms.get(key)) for ms in columns)]
        for key in keys
    ]
    head = ["precision", "", *(result.name for result in results)]
    return "All variants, ms per step (medians)", head, rows


def kernels(result, precision):
    """Return the table of our kernels, sorted by time. GB/s count each array of a kernel once."""
    by_time = result.kernels[precision]
    total, rest = sum(row["ms"] for row in by_time), by_time[ROWS:]
    rows = [_kernel(row, total) for row in by_time[:ROWS]]
    if rest:
        sums = {k: sum(row[k] for row in rest) for k in ("times", "ms", "bytes", "flop")}
        rows.append(_kernel({"name": f"{len(rest)} others", "shape": "", **sums}, total))
    head = ["kernel", "largest arrays", "launches", "µs", "share", "GB/s", "TFLOP/s"]
    title = (
        f"{result.name}, {precision}: kernels by time, {total * 1e3:.0f} µs in total, each timed "
        "with separate events"
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
