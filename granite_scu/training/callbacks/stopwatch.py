"""Time spent training: validation and saving do not count."""

import time

import lightning as L


class Stopwatch(L.Callback):
    """Runs while training, stands still during validation and checkpoints."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._since: float | None = None
        self._last = (0, 0.0)
        self._began, self._before = time.perf_counter(), 0.0

    @property
    def wall_seconds(self) -> float:
        """Seconds of the whole run so far, those up to a resumed checkpoint among them."""
        return self._before + time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resumed checkpoint among them."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._elapsed + running

    def rate(self, count: int) -> float:
        """Units of ``count`` (tokens) a second since the last call."""
        (before, then), self._last = self._last, (count, self.seconds)
        passed = self.seconds - then
        return (count - before) / passed if passed > 0 else 0.0

    def start(self) -> None:
        """Continue."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stand still."""
        self._elapsed = self.seconds
        self._since = None

    def state_dict(self) -> dict:
        return {"elapsed": self.seconds, "last": list(self._last), "wall": self.wall_seconds}

    def load_state_dict(self, state: dict) -> None:
        self._elapsed, self._last = state["elapsed"], tuple(state["last"])
        self._before = state.get("wall", state["elapsed"])  # older checkpoints have the time of training alone

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stop()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start()
