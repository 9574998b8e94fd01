"""The commands beside training, for the command ``granite-scu`` and the help of those that train."""

ASIDE = {
    "data": (
        "granite_scu.cli.inspect_data",
        "show what a run would train on: counts, lengths, samples with what is learned",
    ),
    "merge": ("granite_scu.cli.merge", "write base model and adapter as one plain model"),
    "generate": ("granite_scu.cli.generate", "let base model and adapter go on with a text, side by side"),
    "runs": ("granite_scu.cli.list_runs", "list the runs in a folder, and compare them"),
}
"""Commands that train nothing, so that they need none of the configuration: module and meaning of each.

The module has ``add_arguments(parser)`` and ``run(options) -> exit code``."""


def describe() -> str:
    """What there is besides, for the help of what trains."""
    each = "; ".join(f"{name}: {meaning}" for name, (_, meaning) in ASIDE.items())
    return f"Besides training, each with its own --help. {each}."
