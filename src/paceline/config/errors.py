"""The root of every failure that is the user's to mend."""


class PacelineError(Exception):
    """A mistake the user can mend: `str(error)` says what and why, `hint` says what to type next.

    The command line prints both without a traceback and exits with code 2.
    """

    hint: str = ""
