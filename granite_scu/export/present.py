"""What people look at in a run folder: the picture of S and lambda, the report, and the model card."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from granite_scu.config.errors import UserError
from granite_scu.export.publish import model_card
from granite_scu.storage.run_folder import MODEL_CARD, TRAINING_CONFIG, RunFolder


@contextlib.contextmanager
def write_report_on_exit(folder: RunFolder) -> Iterator[None]:
    """Around a run: at its end the folder has everything to look at, or, if it failed, the report of how far it got.

    A run that was refused has not touched its folder, and nothing is written there.
    """
    main, before = rank_zero_only.rank == 0, _written(folder.path)
    try:
        yield
    except BaseException:
        # Should the report fail too, the first failure counts.
        with contextlib.suppress(OSError, ValueError, UserError):
            if main and _written(folder.path) != before and folder.read_history():
                report(folder.path)
        raise
    if main:
        present(folder.path)


def _written(folder: Path) -> int | None:
    """When a run wrote the first of its files, in nanoseconds; None where none did."""
    mark = folder / TRAINING_CONFIG
    return mark.stat().st_mtime_ns if mark.is_file() else None


def present(folder: Path) -> None:
    """Write the picture, the report and the model card of a finished run."""
    from granite_scu.viz.style import drawing

    picture(folder)
    with drawing("the report", f"granite-scu report {folder}"):
        report(folder)
    RunFolder(folder).write_text(MODEL_CARD, model_card.model_card(model_card.gather(folder)))


def picture(folder: Path) -> None:
    """Draw S and lambda over the run."""
    from granite_scu.viz.control_plot import plot_control
    from granite_scu.viz.run_folder import read_run
    from granite_scu.viz.style import drawing, save

    with drawing("the picture of S and lambda", f"granite-scu plot {folder} --out DIR"):
        save(plot_control(read_run(folder)), folder / "control")


def report(folder: Path) -> None:
    """Write the page about a run, as far as it got."""
    from granite_scu.viz.report import NAME, write_report
    from granite_scu.viz.run_folder import read_run

    write_report(read_run(folder), folder / NAME)
