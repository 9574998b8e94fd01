"""Keeps pytest, which looks for examples in every module, from importing the helpers that need Triton.

Without Triton they end the collection of all tests; with it they would set how it works for all of this process.
"""

from pathlib import Path

NEED_TRITON = {"compiling.py", "interpreting.py", "real_kernels.py"}


def pytest_ignore_collect(collection_path, config):
    """A file that is named on the command line is collected."""
    named = {Path(argument.partition("::")[0]).name for argument in config.args}
    return True if collection_path.name in NEED_TRITON - named else None
