"""What the line says of the time that is left."""

from functools import partial
from types import SimpleNamespace

from rich.console import Console

from granite_scu.config.progress import Heartbeat
from granite_scu.training.callbacks import progress
from granite_scu.training.prepared_run import validations


def test_the_rest_has_its_validations_and_the_scores_at_the_end(monkeypatch):
    line = progress.ProgressLine(1, Console(quiet=True), partial(validations, 100, every=20), scored=3.0)
    line._heartbeat = Heartbeat(100)
    clock = iter([50.0, 52.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert line.besides(20) == 0  # how long one takes, is not known before the first
    trainer = SimpleNamespace(is_global_zero=False)
    line.on_validation_start(trainer, None)
    line.on_validation_end(trainer, None)
    # At 2 seconds each: those of the steps 40, 60, 80 and 100, and three at the end.
    assert [line.besides(step) for step in (21, 40, 41)] == [4 * 2 + 3 * 2, 4 * 2 + 3 * 2, 3 * 2 + 3 * 2]


def test_drift_stands_beside_the_lambda_that_holds_it():
    tick = {"data_bpt": 3.21, "s": 0.031, "s_ema": None, "s_target": None, "saturated": False, "held": False,
            "lambda": 0.84, "tokens_per_s": 900.0}  # fmt: skip
    assert "lambda 0.84" in progress.describe(tick) and "drift" not in progress.describe(tick)
    held = progress.describe(tick | {"drift": 0.019, "drift_target": 0.02})
    assert "drift 1.9 % (at most 2 %)  lambda 0.84  900 tok/s" in held  # S tells nothing there
