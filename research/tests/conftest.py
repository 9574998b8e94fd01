"""The fixtures of the package's tests, as far as these need them."""

from conftest import (  # noqa: F401
    _no_log_of_another_file,
    _no_log_of_another_test,
    _nothing_of_the_user,
    bf16,
    no_bf16,
)
