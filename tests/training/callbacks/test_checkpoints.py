"""When a checkpoint is saved, and when not."""

from contextlib import nullcontext

import lightning as L
import pytest
from torch.utils.data import DataLoader

from granite_scu.config.errors import Stopped
from granite_scu.config.settings import DataConfig
from granite_scu.storage.checkpoint import AdapterCheckpointIO
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.callbacks.checkpoints import Checkpoints, has_ended
from granite_scu.training.callbacks.throughput import Stopwatch
from granite_scu.training.module import GraniteModule


def test_while_steps_are_not_finite_none_is_saved_and_none_removed(make_module, make_batches, fit, poison, tmp_path):
    """The weights may have gone wrong before; then the checkpoints from before that are all there is."""
    module, seen = make_module(), []
    io = AdapterCheckpointIO(module)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir(parents=True, exist_ok=True)

    class Watched(Checkpoints):
        def on_train_batch_end(self, trainer, module, *rest):
            super().on_train_batch_end(trainer, module, *rest)
            seen.append([path.name for path in folder.checkpoints()])

    saving = Watched(folder, save_steps=2, eval_steps=100, keep=1, stopwatch=Stopwatch())
    batches = [poison(module, batch) if i in (3, 4, 5) else batch for i, batch in enumerate(make_batches(8))]
    fit(module, batches, plugins=[io], callbacks=[saving])
    assert seen == [[], *[["checkpoint-2"]] * 5, ["checkpoint-7"], ["checkpoint-8"]]


@pytest.mark.parametrize("at", [1, 2])
def test_a_validation_that_a_signal_cut_is_made_up_for_from_its_first_batch(
    at, make_module, make_batches, fit, tmp_path
):
    """Lightning would resume it at the batch where it was cut, and the mean would be that of the rest."""
    folder, seen = RunFolder(tmp_path / "run"), []
    folder.path.mkdir(parents=True, exist_ok=True)

    class Validated(GraniteModule):
        def val_dataloader(self):
            return DataLoader(make_batches(3, seed=1), batch_size=None)

    class Cut(L.Callback):
        def on_validation_batch_start(self, trainer, module, batch, batch_idx, *_):
            if batch_idx == at:
                saving.save(trainer)
                raise Stopped("", 143)

    class Watch(L.Callback):
        def on_validation_batch_start(self, trainer, module, batch, batch_idx, *_):
            seen.append((trainer.global_step, batch_idx))

    def train(callback, **more):
        module = make_module(Validated)
        settings = {"plugins": [AdapterCheckpointIO(module)], "max_steps": 4, "val_check_interval": 2}
        settings |= {"check_val_every_n_epoch": None, "num_sanity_val_steps": 0, "callbacks": [saving, callback]}
        fit(module, make_batches(4), **settings, **more)

    saving = Checkpoints(folder, save_steps=100, eval_steps=2, keep=1, stopwatch=Stopwatch())
    with pytest.raises(Stopped):
        train(Cut())
    train(Watch(), ckpt_path=folder.path / "checkpoint-2")
    assert seen == [(step, index) for step in (2, 4) for index in range(3)]


def test_a_run_that_continues_anothers_checkpoint_has_its_own_of_the_same_step(
    make_module, make_batches, fit, tmp_path
):
    """That is what it names where it is stopped before its first step."""
    saving, places = [], [tmp_path / "first" / "checkpoint-1", tmp_path / "second" / "checkpoint-1"]

    class Stop(L.Callback):
        def on_train_start(self, trainer, module):
            if trainer.global_step:
                saving[-1].save(trainer)
                raise Stopped("", 143)

    for place, before in zip(places, (None, places[0]), strict=True):
        folder, module = RunFolder(place.parent), make_module()
        folder.path.mkdir(parents=True, exist_ok=True)
        saving.append(Checkpoints(folder, save_steps=1, eval_steps=None, keep=1, stopwatch=Stopwatch()))
        settings = {"plugins": [AdapterCheckpointIO(module)], "callbacks": [saving[-1], Stop()]}
        with nullcontext() if before is None else pytest.raises(Stopped):
            fit(module, make_batches(1), max_steps=1 + bool(before), ckpt_path=before, **settings)
    assert all(place.is_dir() for place in places)


def test_a_run_that_had_stopped_itself_goes_on_with_other_settings_alone():
    stopped = {"stopping": True, "settings": {"--max-time": "00:01:00:00"}}
    assert has_ended(stopped, {"--max-time": "00:01:00:00"})
    assert not has_ended(stopped, {"--max-time": "00:02:00:00"})
    assert not has_ended(stopped | {"stopping": False}, stopped["settings"])
    moved = {"--max-time": "00:01:00:00", "--model": "/elsewhere/model"}
    assert has_ended(stopped | {"settings": moved | {"--model": "model", "--validation-data": "val.jsonl"}}, moved)
    assert not {"validation_data", "test_data"} - set(DataConfig.NO_INFLUENCE)
