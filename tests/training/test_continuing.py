"""What a checkpoint of other blocks is refused with."""

from collections import defaultdict
from pathlib import Path

import pytest

from granite_scu.config.errors import UserError
from granite_scu.training.continuing import check_blocks
from granite_scu.training.resume import TEXT, Resume


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"--held-out-share": 0.2}, "--held-out-share was 0.2 and is now None"),
        ({}, "an earlier version.*--adapter"),
        ({"--held-out-share": None}, None),  # the text itself is another: said by who compares all that is fixed
    ],
)
def test_other_blocks_are_refused_by_what_makes_them(settings, words):
    now = defaultdict(lambda: None)
    resume = Resume(Path("run/checkpoint-4"), {"settings": settings, "frozen": {TEXT: "one"}}, in_place=True)
    check_blocks(resume, now, "one")
    if words is None:
        check_blocks(resume, now, "two")
        return
    with pytest.raises(UserError, match=words):
        check_blocks(resume, now, "two")
