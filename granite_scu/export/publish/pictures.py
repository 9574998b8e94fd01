"""Pictures of a run folder, which others may have changed: without anything in them that is no picture."""

import struct
import zlib
from xml.etree import ElementTree

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SHOWN = (b"IHDR", b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"sBIT", b"bKGD", b"pHYs", b"IDAT", b"IEND")
"""The chunks of a PNG that say how it looks. Texts, times and profiles are others."""

_ELEMENTS = {
    "svg", "defs", "style", "g", "path", "use", "clipPath", "rect", "circle", "ellipse", "line", "polyline", "polygon",
    "text", "tspan", "title", "desc", "linearGradient", "radialGradient", "stop", "mask", "pattern", "symbol",
    "metadata", "RDF", "Work", "type", "format", "creator", "Agent", "date",
}  # fmt: skip
"""What a drawing has, and matplotlib's note of where it is from."""


def bare_png(content: bytes) -> bytes:
    """A PNG of the chunks alone that show something; what stands in others, or after its end, is left out.

    Raises:
        ValueError: it is no PNG, or not whole.
    """
    if not content.startswith(_SIGNATURE):
        raise ValueError("is not a PNG picture")
    kept, at, kind = _SIGNATURE, len(_SIGNATURE), b""
    while kind != b"IEND":
        size = int.from_bytes(content[at : at + 4], "big")
        kind, end = content[at + 4 : at + 8], at + 12 + size
        if end > len(content) or struct.pack(">I", zlib.crc32(content[at + 4 : end - 4])) != content[end - 4 : end]:
            raise ValueError("is not a whole PNG picture")
        kept, at = kept + (content[at:end] if kind in _SHOWN else b""), end
    return kept


def check_svg(content: bytes) -> None:
    """Refuse a drawing that does something, or loads something from elsewhere.

    Raises:
        ValueError: says what it holds.
    """
    if b"<!ENTITY" in content or content.count(b"<?") > content.startswith(b"<?xml "):
        raise ValueError("defines entities, or names a style sheet")
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise ValueError(f"is not XML ({error})") from error
    for element in root.iter():
        tag = _local(element.tag)
        if tag not in _ELEMENTS:
            raise ValueError(f"holds <{tag}>")
        for name, value in element.attrib.items():
            if _local(name).lower().startswith("on"):
                raise ValueError(f"holds {_local(name)}, which runs a script")
            if _local(name) in ("href", "src") and not value.strip().startswith("#"):
                raise ValueError(f"refers to something outside of it by {_local(name)}")
            _check_style(value if _local(name) != "resource" else "")  # which is where matplotlib's note is explained
        _check_style(element.text or "" if tag == "style" else "")


def _check_style(text: str) -> None:
    """Refuse a style that loads something. Escapes would hide it, and no style of a chart has one."""
    small = "".join(text.lower().split())
    loads = small.count("url(") != small.count("url(#")
    if loads or "//" in small or "@import" in small or "javascript:" in small or "\\" in small:
        raise ValueError("has a style that loads something")


def _local(name: object) -> str:
    """A name without its namespace; processing instructions have none."""
    return name.rpartition("}")[2] if isinstance(name, str) else "a processing instruction"
