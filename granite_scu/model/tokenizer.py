"""The tokenizer of a folder, which is tried in a process of its own first.

At some contents of a ``tokenizer.json`` the tokenizers library, which is written in Rust, ends the process; others make
millions of tokens of a page. No schema says which.
"""

import os
import subprocess
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from granite_scu.config import own_python

TEXT = "The quick brown fox: 3 < 5, na\u00efve.\n\n\tdef f(x):  return x\n"
"""What is tried on."""

_SECONDS, _MEMORY = 5, 4 << 30
_MAX_TOKENS = 20 * len(TEXT)
_LARGEST_ID, _LONGEST = 10_000_000, 10_000

_TRY = f"""
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
    resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
except ImportError:  # on Windows
    pass
from tokenizers import Tokenizer
try:
    tokenizer = Tokenizer.from_file(sys.argv[1])
    ids = tokenizer.encode({TEXT!a}).ids
    if len(ids) > {_MAX_TOKENS}:
        sys.exit(f"it makes {{len(ids):,}} tokens of {len(TEXT)} characters")
    tokens = tokenizer.get_vocab()
    if (largest := max(tokens.values(), default=0)) > {_LARGEST_ID}:
        sys.exit(f"it has a token of the number {{largest}}")
    if (longest := max(map(len, tokens), default=0)) > {_LONGEST}:
        sys.exit(f"it has a token of {{longest:,}} characters")
    tokenizer.decode(ids)
except Exception as error:
    sys.exit(str(error))
"""


def read_tokenizer(path: str, ours: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of a model on the hub. It has been tried.

    Args:
        path: the folder, or the hub id.
        ours: it comes with this package, and needs no process of its own to be tried in.

    Raises:
        ValueError: its files are wrong. What transformers raises for one that is not there passes.
    """
    if not ours and (file := Path(path) / "tokenizer.json").is_file():
        _try_file(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer.decode(tokenizer(TEXT)["input_ids"])
        texts = (tokenizer.eos_token, tokenizer.chat_template)
    except (AttributeError, TypeError, ArithmeticError, LookupError, AssertionError) as error:
        raise ValueError(f"its tokenizer's files are wrong ({type(error).__name__}: {error})") from error
    if not all(isinstance(text, str | dict | None) for text in texts):
        raise ValueError("its tokenizer's end of text or chat template is no text")
    return tokenizer


def _try_file(file: Path) -> None:
    """Raises ValueError where the library refuses a ``tokenizer.json`` or ends, takes longer than 5 seconds or more
    than 4 GiB, or makes more tokens of a text than any tokenizer would."""
    line = own_python.command(_TRY, str(file))
    alone = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # threads reserve memory
    try:
        done = subprocess.run(
            line, env=alone, stdin=subprocess.DEVNULL, capture_output=True, timeout=12 * _SECONDS, check=False
        )
        code, words = done.returncode, done.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired:
        code, words = -1, []
    if code == 1 and words:
        raise ValueError(f"its tokenizer.json cannot be used: {words[-1][:150]}")
    if code:
        limits = f"{_SECONDS} seconds or {_MEMORY >> 30} GiB"
        raise ValueError(f"its tokenizer.json cannot be used: the library ends at it, or takes more than {limits}")
