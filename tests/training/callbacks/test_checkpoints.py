"""When a checkpoint is saved, and when not."""

from granite_scu.storage.checkpoint import AdapterCheckpointIO
from granite_scu.storage.run_folder import RunFolder
from granite_scu.training.callbacks.checkpoints import Checkpoints, has_ended
from granite_scu.training.callbacks.stopwatch import Stopwatch


def test_while_steps_are_not_finite_none_is_saved_and_none_removed(make_module, make_batches, fit, poison, tmp_path):
    """The weights may have gone wrong before; then the checkpoints from before that are all there is."""
    module, seen = make_module(), []
    io = AdapterCheckpointIO(module)
    folder = RunFolder(tmp_path / "run")
    folder.make()

    class Watched(Checkpoints):
        def on_train_batch_end(self, trainer, module, *rest):
            super().on_train_batch_end(trainer, module, *rest)
            seen.append([path.name for path in folder.checkpoints()])

    saving = Watched(folder, save_steps=2, eval_steps=100, keep=1, stopwatch=Stopwatch())
    batches = [poison(module, batch) if i in (3, 4, 5) else batch for i, batch in enumerate(make_batches(8))]
    fit(module, batches, plugins=[io], callbacks=[saving])
    assert seen == [[], *[["checkpoint-2"]] * 5, ["checkpoint-7"], ["checkpoint-8"]]


def test_a_run_that_had_stopped_itself_goes_on_with_other_settings_alone():
    stopped = {"stopping": True, "settings": {"--max-time": "00:01:00:00"}}
    assert has_ended(stopped, {"--max-time": "00:01:00:00"})
    assert not has_ended(stopped, {"--max-time": "00:02:00:00"})
    assert not has_ended(stopped | {"stopping": False}, stopped["settings"])
