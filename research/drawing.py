"""Pictures as a command writes them."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from granite_scu.config.errors import INTERRUPTED, WRONG_REQUEST, UserError
from granite_scu.storage.run_folder import require_writable
from granite_scu.viz.style import as_designed, save


def save_all(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """``save`` each under its name in the folder."""
    return [file for name, figure in figures.items() for file in save(figure, folder / name)]


def draw_to(folder: str | Path, draw: Callable[[], Mapping[str, Figure]]) -> int:
    """Draw, ``save_all`` in the folder, and say so, or in one line why not; returns the exit code of a command."""
    try:
        with as_designed():
            figures = draw()
            require_writable("--out", Path(folder))
            written = save_all(figures, Path(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    print(*written, sep="\n")
    return 0
