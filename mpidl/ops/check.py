"""What an op checks of its arguments: each error says what was expected and what was found."""

from mpidl import shapes
from mpidl.blocks import Blocked

BLOCKED = (  # where a value per image comes from
    "a dl.MinibatchQueue gives such values, dl.from_images(array, dl.share(count, world)) makes "
    "one of an array"
)


def images(name, x, ndim=None):
    """x must be blocked, with `ndim` axes counting the images' own."""
    if not isinstance(x, Blocked):
        raise TypeError(
            f"{name}: expected a value per image (Blocked), got {type(x).__name__}; {BLOCKED}"
        )
    if ndim is not None and len(x.shape) != ndim:
        axes = "(N, C, H, W)" if ndim == 4 else f"{ndim} axes"
        raise ValueError(f"{name}: expected x of shape {axes}, got {x.shape}")
    return x


def fixed(value):
    """An option as a value that cannot change: lists become tuples."""
    return tuple(fixed(v) for v in value) if isinstance(value, (list, tuple)) else value


def whole(name, option, value, least=1):
    """value, an integer >= least."""
    if not _is_whole(value, least):
        raise ValueError(f"{name}: {option} must be an integer >= {least}, got {value!r}")
    return value


def _is_whole(value, least):
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_numbers(*values):
    """Whether each is an integer or a float."""
    return all(isinstance(value, (int, float)) for value in values)


def both_of(value):
    """A value given once or as (down, across), as a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value, value)


def pair(name, option, value, least):
    """An option given once or as (down, across), as a pair of integers >= least."""
    both = both_of(value)
    if len(both) != 2 or not all(_is_whole(v, least) for v in both):
        raise ValueError(f"{name}: {option} must be an integer >= {least} or two, got {value!r}")
    return both


def pads(name, value, option="padding"):
    """Padding given as p, (down, across) or ((top, bottom), (left, right)), as the last."""
    both = tuple(both_of(v) for v in both_of(value))
    sides = [v for axis in both for v in axis]
    if len(both) != 2 or len(sides) != 4 or not all(_is_whole(v, 0) for v in sides):
        raise ValueError(
            f"{name}: {option} must be an integer >= 0, (down, across) or ((top, bottom), (left, "
            f"right)), got {value!r}"
        )
    return both


def same_or_pads(name, value, image, size, stride, dilation=(1, 1)):
    """`pads`, or "same": so that an image (H, W) gives ceil(H / stride) x ceil(W / stride) outputs,
    and of an odd number of rows the one more is at the bottom, of columns at the right."""
    if value != "same":
        return pads(name, value)
    return shapes.same_padding(image, size, stride, dilation)
