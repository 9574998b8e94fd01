"""What docs/guides/data.md promises: a larger text takes no more memory, whatever stands in it."""

import base64
import json
import random
import subprocess
import sys

import pytest

from granite_scu.config.errors import UserError
from granite_scu.data.sources.documents import Conversation
from granite_scu.data.tokens import encoding, pieces

MEASURE = """
import resource, sys
from granite_scu.config.settings import DataConfig
from granite_scu.data.tokens.corpus import prepare
from granite_scu.model.loading import load_tokenizer
tokenizer = load_tokenizer("tiny-granite-h")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(DataConfig(sys.argv[1], cache_dir=sys.argv[2]), tokenizer)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""

TEXTS = {
    "base64.txt": lambda: base64.b64encode(random.Random(0).randbytes(12_000_000)),
    "one letter.txt": lambda: b"a" * 16_000_000,
    "long line.jsonl": lambda: json.dumps({"text": "a b1 " * 3_200_000}).encode() + b"\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_sixteen_megabytes_without_a_place_to_cut_take_half_a_gigabyte_at_most(tmp_path, name):
    """In one piece they would take four: some 250 bytes a character."""
    (tmp_path / name).write_bytes(TEXTS[name]())
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 512


def test_a_conversation_too_long_to_be_tokenised_at_once_is_refused(chatting, monkeypatch):
    monkeypatch.setattr(pieces, "LONGEST_CHAT", 1000)
    said = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo " * 400})
    with pytest.raises(UserError, match=r"--data-dir chats.jsonl:3: a conversation of 1,\d+ characters.*at most 1,000"):
        encoding.encode([Conversation("chats.jsonl:3", str(said), said)], chatting)
