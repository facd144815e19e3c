"""Stop a run with a file named `stop` in the run's folder. The file contains "now" or "epoch"."""

import contextlib
import os
import secrets

NAME = "stop"
NOW, EPOCH = "now", "epoch"  # stop after the current mini-batch, or after the current epoch
REASON = "stop file"  # the reason in `Result.stopped` and in the command's last line
SECONDS = 0.5  # shortest time between two checks for the file
MAX_BYTES = 64


def read(folder: str | os.PathLike[str]) -> str | None:
    """Return the request in a run's folder: `NOW`, `EPOCH`, or None if there is no request.

    A file with other content, such as an empty file, is not a request. Symbolic links are not
    followed.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(os.path.join(folder, NAME), flags)
    except OSError:
        return None
    try:
        text = os.read(descriptor, MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:  # a folder
        return None
    finally:
        os.close(descriptor)
    return text if text in (NOW, EPOCH) else None


def request(folder: str | os.PathLike[str], moment: str) -> None:
    """Ask the run in a folder to stop after the current mini-batch ("now") or after the current
    epoch. A run never sees an incomplete request. Raises OSError if the folder does not exist or
    cannot be written to.
    """
    if moment not in (NOW, EPOCH):
        raise ValueError(f"moment must be {NOW} or {EPOCH}, found {moment}")
    part = os.path.join(folder, f".{NAME}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, 0o644)  # the run must be able to read it, despite the umask
        os.write(descriptor, f"{moment}\n".encode())
        os.close(descriptor)
        os.replace(part, os.path.join(folder, NAME))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove the request in a run's folder, if any."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, NAME))
