"""What a corpus is made of."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text that stands for itself: it falls into one split as a whole.

    Attributes:
        name: where it came from, for messages: a path, or path and line.
        text: its contents.
    """

    name: str
    text: str

    @property
    def digest(self) -> str:
        """By which the text is known again: the first 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]
