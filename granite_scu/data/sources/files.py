"""The files of a corpus: found in folders and by patterns, unpacked, and decoded a piece at a time."""

import codecs
import glob
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from granite_scu.config.errors import UserError

PACKED = (".gz", ".zst")
"""Suffixes of compressed files, behind the suffix of what is in them."""

PIECE = 1 << 20
"""Bytes read at a time."""

LONGEST_LINE = 50_000_000
"""Characters of a line or field of a file of records, which is read at once."""


def kind(path: Path) -> str:
    """The suffix that says what a file holds, in lower case and without that of a compression.

    >>> kind(Path("a/Chats.JSONL.gz"))
    '.jsonl'
    """
    name = Path(path.name.lower())
    return (name.with_suffix("") if name.suffix in PACKED else name).suffix


def is_text(path: Path) -> bool:
    """Whether a file begins as text in UTF-8 does; an empty one too."""
    try:
        with path.open("rb") as file:
            beginning = codecs.getincrementaldecoder("utf-8")().decode(file.read(4096))
    except (OSError, UnicodeDecodeError):
        return False
    return "\0" not in beginning


def search(given: str) -> tuple[list[Path], Counter[str]]:
    """Every file that a path stands for, sorted: itself, those in a folder in depth, or those that a pattern matches;
    and the number of those that are passed over: the hidden ones of a folder, such as git's, and links to others here.

    Raises:
        UserError: neither a file nor a folder, or one that may not be read.
    """
    try:
        matched = _matched(given)
        inside = {path for folder in matched if folder.is_dir() for path in _in_depth(folder)}
        named = {file for path in matched if not path.is_dir() for file in _as_file(path)}
    except OSError as error:
        raise unreadable(given, error) from error
    hidden = {path for path in inside if path.name.startswith(".")}
    every = sorted(named | inside - hidden)
    once: dict[str, Path] = {}
    for path in every:
        place = os.path.realpath(path)
        if place not in once or (not path.is_symlink() and kind(path) == kind(once[place])):
            once[place] = path
    return sorted(once.values()), Counter({"hidden": len(hidden), "linked twice": len(every) - len(once)})


def _matched(given: str) -> list[Path]:
    root = Path(given).expanduser()
    if root.exists() and not (root.is_file() or root.is_dir()):
        raise UserError(f"--data-dir {root}: neither a file nor a folder; give one that holds text")
    if root.exists() or root.is_symlink():  # of a link that leads nowhere, who reads it says so
        return [root]
    if glob.has_magic(given):
        _check_searched(root)
        return [Path(name) for name in glob.glob(str(root), recursive=True)]
    return []


def _check_searched(pattern: Path) -> None:
    """Raise OSError for a folder that a pattern searches and that may not be read: glob would pass over it."""
    parts = pattern.parts
    for number, part in enumerate(parts):
        if number and glob.has_magic(part):
            for folder in glob.iglob(str(Path(*parts[:number])), recursive=True):
                if os.path.isdir(folder):
                    os.scandir(folder).close()


def _in_depth(root: Path) -> list[Path]:
    """The files of a folder in depth, through links too, and of a folder that is reached twice once; hidden folders as
    they are, for nothing in them is read."""
    found: list[Path] = []
    seen: set[str] = set()
    # os.walk, since Path.rglob passes over a folder that it may not read.
    for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = sorted({*folders} - {*hidden})  # so that of two ways to a folder the same one is taken everywhere
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(place)
        found += [file for name in names for file in _as_file(Path(folder) / name)]
        found += [Path(folder) / name for name in hidden]
    return found


def _as_file(path: Path) -> list[Path]:
    """The path, unless it is a pipe or the like, which would be waited for without end. A link that leads nowhere is
    kept: who reads it says so."""
    return [path] if path.is_file() or not path.exists() else []


def _raise(error: OSError) -> NoReturn:
    raise error


@contextmanager
def opened(path: Path, as_it_is: bool = False) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed or as they are.

    Raises:
        UserError: a damaged archive, or a file that is gone by now or may not be read.
    """
    try:
        with path.open("rb") if as_it_is else _unpacked(path) as stream:
            yield stream
    except FileNotFoundError as error:
        if path.is_symlink():
            raise UserError(
                f"--data-dir {path}: a link to {path.readlink()}, which is not there; correct it"
            ) from error
        raise UserError(f"--data-dir {path}: has vanished since the corpus was listed; start again") from error
    except Exception as error:
        # ZstdError is of backports.zstd, which is imported where a file needs it.
        if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)) or type(error).__name__ == "ZstdError":
            reason = f"damaged or not compressed as its name says ({error}); compress it again"
            raise UserError(f"--data-dir {path}: {reason}") from error
        if isinstance(error, OSError):
            raise unreadable(path, error) from error
        raise


def unreadable(path: Path | str, error: OSError) -> UserError:
    """What a file or folder gets that the system does not let us read."""
    place = error.filename or path
    return UserError(f"--data-dir {place}: cannot be read ({error.strerror or error}); check its permissions")


def _unpacked(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".zst":
            from backports import zstd  # only these files need it

            # As wide a window as there is: archives of --long need it.
            return zstd.open(path, "rb", options={zstd.DecompressionParameter.window_log_max: 31})
        case _:
            return path.open("rb")


def unix(text: str) -> str:
    """The text with the line ends that models know: a carriage return before one is Windows', and would be learned."""
    return text.replace("\r\n", "\n")


def decoded(path: Path, encoding: str) -> Iterator[str]:
    """The file's text, a piece at a time, without a byte order mark and the carriage returns of Windows' line ends.

    A file that begins with the mark of UTF-16 is read as that where UTF-8 is asked for.

    Raises:
        UserError: bytes that the encoding does not have, and names the first of them and its line; or NUL, which no
            text has.
    """
    decoder: codecs.IncrementalDecoder | None = None
    offset = line = 0  # bytes read and lines handed on so far
    held = ""  # a carriage return at the end of a piece, of which the line end may begin the next
    with opened(path) as stream:
        while True:
            data = stream.read(PIECE)
            offset += len(data)
            decoder = decoder or _decoder(data, encoding)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:  # its object ends where the data does, and may begin before them
                byte = offset - len(error.object) + error.start
                number = line + bytes(error.object[: error.start]).count(b"\n") + 1
                name = "UTF-8" if _is_utf8(encoding) else encoding
                raise UserError(
                    f"--data-dir {path}: byte {byte} (line {number}) is not valid {name}; convert the file, for "
                    "example with iconv -f latin1 -t utf-8, or, where every file has the same encoding, name it with "
                    "--encoding (such as cp1252)"
                ) from error
            except UnicodeError as error:  # of the text as a whole, such as a missing byte order mark
                raise UserError(
                    f"--data-dir {path}: not valid {encoding} ({error}); name the encoding that it has with --encoding "
                    "(utf-16-le and utf-16-be are without a mark)"
                ) from error
            if "\0" in text:
                number = line + text[: text.index("\0")].count("\n") + 1
                raise UserError(
                    f"--data-dir {path}:{number}: has the character NUL, which no text has; it is a binary file, or "
                    "one in UTF-16 without a mark: leave it out, or convert it, with iconv -f utf-16le -t utf-8"
                )
            text = held + text
            held = "\r" if data and text.endswith("\r") else ""
            text = unix(text.removesuffix(held))
            line += text.count("\n")
            if text:
                yield text
            if not data:
                return


def _decoder(beginning: bytes, encoding: str) -> codecs.IncrementalDecoder:
    if _is_utf8(encoding):
        is_utf16 = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "utf-16" if is_utf16 else "utf-8-sig"
    return codecs.getincrementaldecoder(encoding)()


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def lines(path: Path, encoding: str) -> Iterator[str]:
    """The file's lines, each with its line end: those at ``\\n`` alone, for U+2028 and its like may stand in a text.

    Raises:
        UserError: a line too long to be one record, or what ``decoded`` raises.
    """
    rest, number = "", 1
    for piece in decoded(path, encoding):
        first, *others = piece.split("\n")
        rest += first
        if len(rest) > LONGEST_LINE:
            raise UserError(
                f"--data-dir {path}:{number}: a line of more than {LONGEST_LINE:,} characters, and a record is read at "
                "once; give long texts as files of their own (.txt)"
            )
        number += len(others)
        for other in others:
            yield rest + "\n"
            rest = other
    if rest:
        yield rest
