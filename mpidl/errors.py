"""The one exception that is a user's to mend."""


class UserError(Exception):
    """Unusable options or data: one line naming the file or option, what was expected and found.

    The commands print it from rank 0, without a traceback, and end with exit code 2.
    """


class Fault(Exception):
    """A run that cannot go on, through no option's fault (a loss of NaN): one line, exit code 1."""
