"""From a record to a document: which fields hold the text."""

from granite_scu.data.documents import Document
from granite_scu.data.formats import Record
from granite_scu.errors import UserError


def columns(text_column: str) -> tuple[str, ...]:
    """The fields that a record may have its text in."""
    return (text_column, "messages")


def as_document(place: str, record: Record, column: str) -> Document:
    """The document that a record stands for.

    Args:
        place: of the record, for messages.
        record: its fields.
        column: field that holds the text.

    Raises:
        UserError: no such field, or no text in it.
    """
    if "messages" in record and (column not in record or column == "messages"):
        raise UserError(f"--data-dir {place}: chat data (messages) is not supported yet; give lines with a text field")
    if column not in record:
        fields = ", ".join(record) or "none"
        raise UserError(f"--data-dir {place}: no field {column!r}, there are: {fields}; name one with --text-column")
    return Document(place, _text(record[column], f"field {column!r}", place, "; name another with --text-column"))


def _text(value: object, what: str, place: str, remedy: str) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"--data-dir {place}: {what} is a {kind}, not text{remedy}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which is no character
        raise UserError(
            f"--data-dir {place}: {what} holds a lone surrogate at character {error.start}; mend or remove the line"
        ) from error
    return value
