"""Exceptions: what a user can mend, what stops a run, what happened on another rank."""


class UserError(Exception):
    """Unusable options or data: one line naming the file or option, what was expected and found.

    The commands print it from rank 0, without a traceback, and end with exit code 2.
    """


class Fault(Exception):
    """A run that cannot go on, through no option's fault (a loss of NaN): one line, exit code 1."""


class RankError(Exception):
    """An exception on a rank that `dl.launch` started, with its traceback as the text; it is raised
    from the exception itself where that could be brought back.

    rank, host: where it was; None where a rank ended without an exception.
    """

    def __init__(self, text, rank=None, host=None):
        super().__init__(text)
        self.rank, self.host = rank, host
