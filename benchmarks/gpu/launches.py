"""Count the bytes and the products of a kernel's launch, from its arguments and definitions.

Rules of the bytes: an array of a `const` parameter is read once, and an array of another parameter
is written once. An array that is both counts twice. An array in a Table counts as often as it
occurs there. A gather from a data set counts only the images that it gathers. Kernels can read an
array several times; the count assumes that the cache provides the repetitions.

Rules of the products: a product is a multiplication of two operands with an addition. `issued`
counts the tiles of a kernel with their padding, and the zeros that pad images. `useful` counts the
multiply-adds of the layer: every tap of every output pixel, also where the tap is outside the
image. The three TF32 products of a float32 product count once. Unused lanes count as images.
"""

import functools
import itertools
import math

from mpidl.backends import declarations
from mpidl.backends.gpu import conv, conv_depthwise, fold, kernels, launching, loss
from mpidl.core.blocks import LANES

# {kernel: the columns of its Table that it reads, and those that it writes}; the columns of other
# Tables count as read.
COLUMNS = {
    "optimizer_step": (lambda row: row[1:3] + row[4:], lambda row: row[3:]),
    "running": (lambda row: row[:2], lambda row: row[2:3]),
    **{name: (lambda row: row[:1], lambda row: row[1:2]) for name in fold.KERNELS},
    **{name: (lambda row: row[:3], lambda row: row[3:4]) for name in loss.SUMS},
    "conv_weights": (lambda row: row[:1], lambda row: row[1:2]),
    "images_gather": (lambda row: [_gathered(row), *row[1:9]], lambda row: row[9:10]),
}


def kernel_name(launch) -> str:
    """Return the kernel's name; add the direction if the kernel serves forward and backward."""
    backward = ("BACKWARD", 1) in launch.unit.defines
    return f"{launch.name}, backward" if backward else launch.name


def array_shapes(launch) -> str:
    """Return the shapes of the two largest arrays of a launch."""
    arrays = sorted(_arrays(launch), key=lambda a: -a.nbytes)
    return ", ".join("x".join(map(str, a.dims)) for a in arrays[:2])


def _arrays(launch):
    arrays = []
    for value in launch.arguments:
        arrays += getattr(value, "arrays", [value] if hasattr(value, "dims") else [])
    return arrays


def _gathered(row):
    """Return the part of a data set that is as large as what a row of images_gather reads."""
    source, images = row[0], row[18]
    return source.part(0, (min(len(source), images), *source.shape[1:]))


def _images(launch):
    """Return the number of images of the first array per image, or 0 if there is none."""
    return next((a.shape[0] * LANES for a in _arrays(launch) if _is_per_image(a)), 0)


def _is_per_image(array):
    return array.ndim > 2 and array.shape[-1] == LANES


def bytes_of(launch) -> tuple[int, int]:
    """Return the number of bytes that a launch reads, and the number that it writes."""
    declared = _declared(launch.unit.family)[launch.name]
    read, written = {}, {}  # {(address, bytes): bytes}, so that each array counts once
    in_tables = [0, 0]
    for value, parameter in zip(launch.arguments, declared.parameters, strict=True):
        if isinstance(value, launching.Table):
            sizes = map(sum, zip(*map(_row_counter(launch.name), value.rows), strict=True))
            in_tables = [a + b for a, b in zip(in_tables, sizes, strict=True)]
        elif isinstance(value, launching.Array):
            side = read if parameter.is_const else written
            side[value.address, value.nbytes] = value.nbytes
    return sum(read.values()) + in_tables[0], sum(written.values()) + in_tables[1]


@functools.cache
def _declared(family):
    return declarations.kernels(kernels.source(f"{family}.cu"))


def _row_counter(name):
    """Return a function that counts the bytes read and written of a row of the kernel's Table."""
    reads, writes = COLUMNS.get(name, (lambda row: row, lambda row: []))

    def size(values):
        return sum(v.nbytes for v in values if isinstance(v, launching.Array))

    return lambda row: (size(reads(row)), size(writes(row)))


def numbers_of(launch) -> dict[str, int]:
    """Return the arguments of a launch that are numbers, by the names of the parameters.

    For a convolution, add the fields of its Shape, for which the kernel is compiled.
    """
    pairs = zip(launch.parameters, launch.arguments, strict=True)
    numbers = {p.name: value for p, value in pairs if p.elements is None}
    shape = dict(launch.unit.defines).get("CONV_SHAPE")
    return numbers | (conv.Shape(*map(int, shape.split(",")))._asdict() if shape else {})


def useful(launch) -> int:
    """Return the multiply-adds of the layer that a launch computes, or 0 for other kernels."""
    n = numbers_of(launch)
    if "filters" not in n:
        return 0
    # in conv_gemm, the input of backward-data is dy
    way = (
        ("height", "width")
        if ("BACKWARD", 1) in launch.unit.defines
        else ("out_height", "out_width")
    )
    taps, pairs = n["taps_down"] * n["taps_across"], n["channels"] * n["filters"] // n["groups"]
    return _images(launch) * n[way[0]] * n[way[1]] * taps * pairs


def _padded(size, step):
    return -(-size // step) * step


def _matrix_product(launch):
    """Products of conv_gemm: depth is (r, s, c). Products of conv_dweight: depth is pixels."""
    defines, n = dict(launch.unit.defines), numbers_of(launch)
    tile, deep = defines["BM"] * defines["BN"], 16 if "BF16" in defines else 8
    n["channels"] += defines["EXTRA"]
    if launch.name == "conv_dweight":
        pixels, images = n["out_height"] * n["out_width"], _images(launch)
        leaves = images // n["images"]
        tiles = _tiles(
            n["taps_down"] * n["taps_across"] * n["channels"] // n["groups"], "BM", defines
        )
        tiles *= _tiles(n["filters"] // n["groups"], "BN", defines) * n["groups"]
        return leaves * tiles * tile * _padded(n["images"] * pixels, deep)
    across = _tiles(n["filters"] // n["groups"], "BN", defines) * n["groups"]
    return (
        across
        * tile
        * sum(
            rows * _padded(taps * n["channels"] // n["groups"], deep)
            for rows, taps in _classes(n, defines)
        )
    )


def _tiles(size, side, defines):
    return -(-size // defines[side])


def _classes(n, defines):
    """Yield (tiles, taps) of each class of pixels with the same taps in conv_gemm."""
    axes = []
    for size, way, step, before, dilation in (
        ("height", "down", n["stride_down"], n["top"], n["dilation_down"]),
        ("width", "across", n["stride_across"], n["left"], n["dilation_across"]),
    ):
        pixels, taps = n[f"out_{size}"], n[f"taps_{way}"]
        if defines["BACKWARD"]:
            classes = [
                (-(-(pixels - i) // step), _taps(taps, i + before, step, dilation))
                for i in range(step)
            ]
        else:
            classes = [(pixels, taps)]
        axes.append(classes)
    for (p, r), (q, s) in itertools.product(*axes):
        yield _tiles(n["images"] * p * q + n["skipped"], "BM", defines), r * s


def _taps(all_taps, place, step, dilation):
    return sum((place - tap * dilation) % step == 0 for tap in range(all_taps))


def _direct(launch):
    n = numbers_of(launch)
    taps = n["taps_down"] * n["taps_across"]
    depth = {
        "conv_direct_forward": lambda: taps * n["channels"] // n["groups"],
        "conv_direct_dx": lambda: taps * n["filters"] // n["groups"],
        "conv_direct_dweight": lambda: n["images_per_leaf"] * n["out_height"] * n["out_width"],
    }[launch.name]()
    return math.prod(launch.grid) * 64 * 32 * _padded(depth, 32)


def _depthwise(launch):
    """Products of conv_depthwise, whose threads have a run of pixels, perhaps past a row's end.

    The gradient of the input has products only with the taps that reach a pixel of dy.
    """
    n, pixels, images = numbers_of(launch), conv_depthwise.PIXELS, _images(launch)
    if launch.name.endswith("dx"):
        rows = _reached(n["height"], n["taps_down"], n["stride_down"], n["top"], n["dilation_down"])
        width = _padded(n["width"], pixels)
        step, before, spread = n["stride_across"], n["left"], n["dilation_across"]
        columns = _reached(width, n["taps_across"], step, before, spread)
    else:
        rows = n["out_height"] * n["taps_down"]
        columns = _padded(n["out_width"], pixels) * n["taps_across"]
    return images * n["channels"] * rows * columns


def _reached(size, taps, stride, before, dilation):
    """Return the number of pairs of a row and a tap between which there is a row of dy."""
    return sum(_taps(taps, row + before, stride, dilation) for row in range(size))


# {family: function of a launch that counts the products}
ISSUED = {
    "conv_gemm": _matrix_product,
    "conv_dweight": _matrix_product,
    "conv_direct": _direct,
    "conv_depthwise": _depthwise,
}


def issued(launch) -> int:
    """Return the products that a launch computes, or 0 for kernels without products."""
    count = ISSUED.get(launch.unit.family)
    return count(launch) if count else 0


def unit_of_products(launch) -> str:
    """Return the name of the rate of a launch's products in `floors.Rates`, and "fp32" for 3xTF32.

    The result is "fma" for kernels without tensor cores.
    """
    defines = dict(launch.unit.defines)
    if launch.unit.family not in ("conv_gemm", "conv_dweight"):
        return "fma"
    return "bf16" if "BF16" in defines else {3: "fp32", 1: "tf32"}[defines["TERMS"]]
