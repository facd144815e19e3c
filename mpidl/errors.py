"""Exceptions: user errors, runs that cannot continue, and failures of other ranks."""

from __future__ import annotations

from mpidl.text import printable

LONGEST = 1000  # maximum length of a message in characters; a message may quote a file


class UserError(Exception):
    """Raised if options or data are unusable and the user must correct them.

    The message is one line. It names the file or option, and says what was expected and what was
    found. The commands print the message on rank 0 without a traceback, and exit with code 2.
    """

    def __str__(self) -> str:
        text = printable(super().__str__())
        if len(text) <= LONGEST:
            return text
        return f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 4 :]}"


class UnreadableImage(UserError):
    """Raised if the file of an image is missing, damaged or not an image."""


class FolderInUse(UserError):
    """Raised if the folder of a run is in use by another job."""


class Fault(Exception):
    """Raised if a run cannot continue although its options are valid, for example on a NaN loss.

    The message is one line. The commands exit with code 1.
    """


class NotFinite(Fault):
    """Raised if the loss or the weights become NaN or infinite during training.

    Attributes
    ----------
    description : str
        Text that says what is not finite, and at which iteration. The message of the exception also
        contains advice.
    """

    def __init__(self, description: str, advice: str):
        super().__init__(f"{description}; {advice}")
        self.description = description


class StorageFault(Fault):
    """Raised if an object store does not answer in time, or refuses to store an object."""


class LostLock(Fault):
    """Raised before a run writes to its folder, if another job has taken over the folder."""


class RankError(Exception):
    """Raised if a rank that `dl.launch` started fails. The message is the traceback of the rank.

    `__cause__` is the exception of the rank, if it could be transferred to this process.

    Attributes
    ----------
    rank : int or None
        The rank that failed, or None if the rank ended without raising an exception.
    host : str or None
        The host of the rank, or None if the rank ended without raising an exception.
    """

    def __init__(self, text: str, rank: int | None = None, host: str | None = None):
        super().__init__(text)
        self.rank, self.host = rank, host


def describe(error: BaseException) -> str:
    """Return a one-line description of an exception.

    The description includes the type of the exception unless mpidl defines the type.
    """
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, (UserError, Fault)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
