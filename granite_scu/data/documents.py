"""What a corpus is made of."""

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
