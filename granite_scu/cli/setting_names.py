"""What a message calls a setting: the flag of ``granite-scu train``, or the dotted key that ``fit`` takes.

Messages are written with flags, for most users have those. Of ``fit`` and the other commands of LightningCLI each
message passes through ``as_dotted_keys`` before it is shown.
"""

import logging
import re
from collections.abc import Callable

from granite_scu.config.flags import PRECISIONS, SECTIONS, SWITCH_OR_AUTO, Flag

_BY_NAME = {flag.name.removeprefix("--"): flag for section in SECTIONS.values() for flag in section}
_NAMES = "|".join(sorted(map(re.escape, _BY_NAME), key=len, reverse=True))
_SETTING = re.compile(rf"(?<![\w-])--(?P<no>no-)?(?P<name>{_NAMES})(?![\w-])(?P<value> \w+)?(?P<colon>:)?")
_SWITCH = {"on": "true", "off": "false", "auto": "null"}


def as_dotted_keys(message: str) -> str:
    """A message with the dotted keys in place of flags, and their values where those have other names.

    >>> as_dotted_keys("--max-steps 5: too few; raise it, or add --no-tf32 or --precision bf16")
    '--trainer.max_steps 5: too few; raise it, or add --run.tf32 false or --trainer.precision bf16-mixed'
    """
    return _SETTING.sub(_dotted, message)


def _dotted(found: re.Match[str]) -> str:
    flag, word, colon = _BY_NAME[found["name"]], (found["value"] or "").strip(), found["colon"] or ""
    values = PRECISIONS if flag.key == "trainer.precision" else _SWITCH if _is_switch(flag) else {}
    value, rest = (values[word], "") if word in values else ("", found["value"] or "")
    if not value and _is_switch(flag) and not (colon and not rest):  # as the subject of a message it has none
        value = "false" if found["no"] else "true"
    return " ".join(filter(None, (f"--{flag.key}", value))) + rest + colon


def _is_switch(flag: Flag) -> bool:
    return flag.kind is bool or flag.choices == tuple(SWITCH_OR_AUTO)


class Wording(logging.Formatter):
    """Of log lines that are shown with ``wording``, in a pattern of the standard library's."""

    def __init__(self, wording: Callable[[str], str], pattern: str = "%(message)s") -> None:
        super().__init__(pattern)
        self._wording = wording

    def format(self, record: logging.LogRecord) -> str:
        return self._wording(super().format(record))
