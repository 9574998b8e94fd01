"""What must not leave the machine: credentials and local paths in what is published, tokens in what is printed."""

import html
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from typing import Any

from granite_scu.config.untrusted_input import SECRET_NAME, parse_json

_OWN = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "an AWS secret key": r"(?i)aws.{0,30}(?:secret|key).{0,30}?[^A-Za-z0-9/+](?-i:[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50,})",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a Docker token": r"\bdckr_[a-z]{3}_[A-Za-z0-9_-]{20,}",
    "a wandb key": r"(?i)wandb.{0,40}?[^0-9a-z](?:[0-9a-f]{40}(?![0-9a-f])|wandb_v\d_\w{30,})|\bwandb_v\d_\w{30,}",
    "an Azure key": r"(?i)(?:AccountKey|SharedAccessKey)\s*=\s*[A-Za-z0-9+/]{40,}",
    "a password in a URL": r"\b[A-Za-z][\w+.-]{1,20}://[^\s/:@'\"<>]{0,100}:[^\s/:@'\"<>{}$]{3,200}@[\w\[]",
}
"""What gitleaks' rules of ``secret_patterns.json`` leave out, or want longer; most are of detect-secrets, some of the
services' own documents."""

_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\(/)")
MIN_SECRET = 12
"""Characters of a variable's value that is looked for: shorter ones may stand anywhere."""

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

TOKENS_READ: set[str] = set()
"""What ``hub.find_token`` gave. Nobody else asks huggingface_hub, which may refresh it over the network."""


@cache
def _patterns() -> dict[str, tuple[tuple[str, ...], re.Pattern[str]]]:
    """Of each kind of secret words, in small letters, of which a text has one, and its pattern."""
    kept = files("granite_scu.export.publish").joinpath("secret_patterns.json").read_text(encoding="utf-8")
    own = {kind: ((), re.compile(pattern)) for kind, pattern in _OWN.items()}
    rules = parse_json(kept)["rules"].items()
    return own | {f"a secret ({name})": (tuple(words), re.compile(text)) for name, (words, text) in rules}


def secret_in(text: str, environment: Mapping[str, str] | None = None) -> tuple[int, str] | None:
    """The line (from 1) and kind of the first credential in a text, also one written with the escapes of JSON, XML or
    Jinja; None where there is none.

    Args:
        text: the text.
        environment: variables whose values must not be in it, where their names say that they are secret.

    >>> secret_in("fine\\nkey = AKIAABCDEFGHIJKLMNOP")
    (2, 'an AWS access key')
    """
    for form in dict.fromkeys((text, _unescaped(text))):
        small = form.lower()
        for kind, (words, pattern) in _patterns().items():
            if (not words or any(word in small for word in words)) and (match := pattern.search(form)):
                return form.count("\n", 0, match.start()) + 1, kind
        for name, value in (environment or {}).items():
            is_secret = len(value) >= MIN_SECRET and SECRET_NAME.search(name) and not local_path_in(value)
            if is_secret and value in form:
                return form.count("\n", 0, form.index(value)) + 1, f"the value of the environment's {name}"
    return None


def _unescaped(text: str) -> str:
    """A text as those read it that know its escapes, also within one another.

    >>> _unescaped(r"\\u0068f_ \\x41 &#104; \\u005cu0068 https:\\/\\/")
    'hf_ A h h https://'
    """
    for _ in range(4):
        before, text = text, _ESCAPES.sub(lambda found: found[3] or chr(int(found[1] or found[2], 16)), text)
        text = html.unescape(text)
        if text == before:
            break
    return text


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


def redact(text: str) -> str:
    """A text without tokens, and without the query of any URL: that of an upload is a permission to write.

    >>> redact("401 for hf_abcdefghijklmnopqrstuvwxyz at https://host/f?X-Signature=1")
    '401 for hf_*** at https://host/f?***'
    """
    for token in TOKENS_READ:
        text = text.replace(token, "hf_***")
    return _QUERY.sub(r"\1?***", _TOKEN.sub("hf_***", text))
