"""Figures as people read them. Files and code have ratios and seconds."""


def per_cent(ratio: float) -> str:
    """A ratio to three figures, or as many as its whole part has.

    >>> per_cent(0.0098), per_cent(0.02), per_cent(0.1587), per_cent(1.0), per_cent(11.234)
    ('0.98 %', '2 %', '15.9 %', '100 %', '1,123 %')
    """
    return f"{100 * ratio:,.0f} %" if abs(100 * ratio) >= 999.5 else f"{100 * ratio:.3g} %"


def duration(seconds: float) -> str:
    """A time, as exactly as anybody wants to know it beforehand.

    >>> duration(0.2), duration(12), duration(100), duration(3000), duration(21638), duration(400_000)
    ('1 second', '12 seconds', '1.5 minutes', '50 minutes', '6 hours', '4 days 15 hours')
    >>> duration(5400), duration(7300)
    ('1 hour 30 minutes', '2 hours')
    """
    if seconds < 90:
        return counted(max(1, round(seconds)), "second")
    if seconds < 585:
        return f"{round(seconds / 30) / 2:g} minutes"
    minutes = round(seconds / 60)
    if minutes < 90:
        return counted(minutes, "minute")
    if minutes < 6 * 60:
        return _two(*divmod(round(minutes / 5) * 5, 60), "hour", "minute")
    return _two(*divmod(round(minutes / 60), 24), "day", "hour")


def _two(large: int, small: int, large_unit: str, small_unit: str) -> str:
    parts = [counted(count, unit) for count, unit in ((large, large_unit), (small, small_unit)) if count]
    return " ".join(parts)


def counted(count: int, thing: str) -> str:
    """How many there are of a thing.

    >>> counted(1, "document"), counted(1234, "document")
    ('1 document', '1,234 documents')
    """
    return f"{count:,} {thing}{'s' * (count != 1)}"


def memory(n_bytes: float) -> str:
    """Bytes of memory or of a disk.

    >>> memory(2.25 * 2**30), memory(2**27), memory(2**20)
    ('2.2 GiB', '128.0 MiB', '1.0 MiB')
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes > 2**27 else f"{n_bytes / 2**20:.1f} MiB"
