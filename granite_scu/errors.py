"""The two ways a run goes wrong, and the exit code of each."""


class UserError(Exception):
    """The request or its data is wrong: one line that says what, where, and what to do. Exit code 2."""


class RunFailed(Exception):
    """The request was right and the run failed. One line with a diagnosis. Exit code 1."""
