"""What people look at in a run folder: the picture of S and lambda, the report, and the model card."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from granite_scu.config.errors import UserError
from granite_scu.export.publish import model_card
from granite_scu.storage.run_folder import TRAINING_CONFIG, RunFolder

log = logging.getLogger(__name__)


@contextlib.contextmanager
def drawing(what: str, command: str) -> Iterator[None]:
    """Around a picture, drawn as designed. Where a library fails at it, a warning says how to draw it later.

    Args:
        what: the picture.
        command: draws it later.

    Raises:
        OSError: it cannot be written.
    """
    from granite_scu.viz.style import as_designed

    try:
        with as_designed():
            yield
    except OSError:
        raise
    except Exception as error:  # of any kind: all that counts is written already
        words = "%s could not be drawn (%s: %s), and all else is complete; draw it with: %s"
        log.warning(words, what, type(error).__name__, error, command)


@contextlib.contextmanager
def presented(folder: RunFolder) -> Iterator[None]:
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
    picture(folder)
    report(folder)
    model_card.write_model_card(folder)


def picture(folder: Path) -> None:
    """Draw S and lambda over the run."""
    from granite_scu.viz.control_plot import plot_control
    from granite_scu.viz.run_folder import read_run
    from granite_scu.viz.style import save

    with drawing("the picture of S and lambda", f"python -m granite_scu.viz.control_plot {folder}"):
        save(plot_control(read_run(folder)), folder / "control")


def report(folder: Path) -> None:
    """Write the page about a run, as far as it got."""
    from granite_scu.viz.report import NAME, write_report
    from granite_scu.viz.run_folder import read_run

    write_report(read_run(folder), folder / NAME)
