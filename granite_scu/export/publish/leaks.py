"""What must not leave the machine: credentials and local paths in what is published, tokens in what is printed."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

_SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50,})",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
}
_SECRET_NAMES = (
    *(".env", ".env.*", "*.env", ".netrc", ".npmrc", ".pypirc", ".git-credentials"),
    *("*token*", "*secret*", "*credential*", "*password*", "*.pem", "*.key", "*.p12", "*.pfx"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
"""Endings of files that can hold a pickle, which runs code when it is loaded."""

_PATH = re.compile(
    r"(?:^|(?<=[\s'\"(=,]))(?:~?(?:/[\w.+@-]+){2,}|~/[\w.+@-]+|[A-Za-z]:[\\/][\w.+@\\/-]+|\\\\\w[\w.\\]+)"
)
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")


def secret_in(text: str) -> tuple[int, str] | None:
    """The line (from 1) and kind of the first credential in a text; None where there is none.

    >>> secret_in("fine\\nkey = AKIAABCDEFGHIJKLMNOP")
    (2, 'an AWS access key')
    """
    for kind, pattern in _SECRETS.items():
        if match := re.search(pattern, text):
            return text.count("\n", 0, match.start()) + 1, kind
    return None


def is_secret_name(name: str) -> bool:
    """Whether files of this name commonly hold credentials.

    >>> is_secret_name("my_hf_TOKEN.txt"), is_secret_name("notes.txt")
    (True, False)
    """
    return any(fnmatch(name.lower(), pattern) for pattern in _SECRET_NAMES)


def local_path_in(text: str) -> str | None:
    """The first path through folders of a machine that a text names.

    >>> local_path_in("see /home/me/run"), local_path_in("https://huggingface.co/a/b and/or c"), local_path_in("~/x")
    ('/home/me/run', None, '~/x')
    """
    match = _PATH.search(text)
    return match.group() if match else None


def strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, with its place.

    >>> list(strings({"a": ["x", {"b": "y"}]}))
    [('a[0]', 'x'), ('a[1].b', 'y')]
    """
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from strings(entry, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from strings(entry, f"{place}[{index}]")


def redact(text: str, token: str | None = None) -> str:
    """A text without tokens, and without the query of any URL: that of an upload is a permission to write.

    >>> redact("401 for hf_abcdefghijklmnopqrstuvwxyz at https://host/f?X-Signature=1")
    '401 for hf_*** at https://host/f?***'
    """
    if token:
        text = text.replace(token, "hf_***")
    return _QUERY.sub(r"\1?***", _TOKEN.sub("hf_***", text))
