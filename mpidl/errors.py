"""Exceptions: what a user can correct, what stops a run, what happened on another rank."""

from __future__ import annotations


class UserError(Exception):
    """Unusable options or data.

    The message is one line that names the file or option, what was expected and what was found.
    The commands print it from rank 0, without a traceback, and end with exit code 2.
    """


class Fault(Exception):
    """A run that cannot continue, though its options are fine: a loss of NaN, for example.

    The message is one line; the commands end with exit code 1.
    """


class RankError(Exception):
    """An exception on a rank that `dl.launch` started; the message is its traceback.

    `__cause__` is the exception itself, if it could be brought back.

    Attributes
    ----------
    rank : int or None
        The rank that failed; None if it ended without an exception.
    host : str or None
        The host of that rank; None if it ended without an exception.
    """

    def __init__(self, text: str, rank: int | None = None, host: str | None = None):
        super().__init__(text)
        self.rank, self.host = rank, host
