"""The page of ``scripts/gpu_check.py``: its JSON as Markdown that docs/ can take as it is."""

from typing import Any


def page(record: dict[str, Any], legs: dict[str, str]) -> str:
    """The whole page.

    Args:
        record: what ``gpu_check.json`` holds.
        legs: what each leg shows, in their order; those without a result are named as not run.
    """
    parts = [f"# GPU check: {card(record)}", "Made by `make gpu-check`.", head(record), results(record, legs)]
    for name in legs:
        result = record["legs"].get(name, {})
        sections = [f"### {table['title']}\n\n{_table(table)}" for table in result.get("tables", [])]
        faults = [f"- {fault}" for fault in result.get("faults", [])]
        if sections or faults:
            parts += [f"## {name}", *(["\n".join(faults)] if faults else []), *sections]
    return "\n\n".join(parts) + "\n"


def card(record: dict[str, Any]) -> str:
    """The name of the card, or that there was none."""
    return record["machine"]["info"]["gpu_name"] or "a CPU, for want of a card"


def head(record: dict[str, Any]) -> str:
    """Card, driver, versions, dates and commits."""
    info, results = record["machine"]["info"], record["legs"].values()
    dates, commits = sorted({each["date"][:10] for each in results}), sorted({each["commit"] for each in results})
    facts = {
        "card": card(record),
        "cards": info["gpu_count"] or None,
        "memory": f"{info['gpu_memory_gb']:.1f} GiB" if info["gpu_count"] else None,
        "compute capability": info["compute_capability"],
        "driver": info["driver_version"],
        "CUDA of PyTorch": info["cuda_version"],
        "PyTorch": info["pytorch_version"],
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "date": " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else None,
        "commit": ", ".join(commits) or None,
    }
    return rows_of(["", ""], [[name, str(fact)] for name, fact in facts.items() if fact is not None], ["left", "left"])


def results(record: dict[str, Any], legs: dict[str, str]) -> str:
    """A row for each leg."""
    rows = []
    several = len({each["commit"] for each in record["legs"].values()}) > 1
    for name, about in legs.items():
        result = record["legs"].get(name, {"status": "not run", "said": "not asked for", "seconds": None})
        at = f" (commit {result['commit'][:9]})" if several and "commit" in result else ""
        seconds = "-" if result["seconds"] is None else duration(result["seconds"])
        rows.append([name, about, result["status"], seconds, result["said"] + at])
    return rows_of(["leg", "what it shows", "result", "time", "found"], rows, ["left", "left", "left", "right", "left"])


def _table(table: dict[str, Any]) -> str:
    """A table of a leg; a column that no row has is left out."""
    shown = {name: column.partition("|") for name, column in table["columns"].items()}
    shown = {name: column for name, column in shown.items() if any(row.get(name) is not None for row in table["rows"])}
    rows = [[cell(row.get(name), style) for name, (_, _, style) in shown.items()] for row in table["rows"]]
    headings = [heading for heading, _, _ in shown.values()]
    return rows_of(headings, rows, ["right" if style else "left" for _, _, style in shown.values()])


def cell(value: Any, style: str) -> str:
    """A value in its format; what is no number is shown as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, style) if style and isinstance(value, int | float) else str(value)


def rows_of(headings: list[str], rows: list[list[str]], sides: list[str]) -> str:
    """A Markdown table; ``sides`` says of each column whether it stands left or right."""
    lines = [headings, ["---:" if side == "right" else "---" for side in sides], *([_safe(c) for c in r] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _safe(text: str) -> str:
    """The text in one line, and no end of a cell or tag of HTML in it."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def duration(seconds: float) -> str:
    """Minutes and seconds, as 3:07."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
