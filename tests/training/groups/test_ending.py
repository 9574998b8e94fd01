from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from granite_scu.training.groups.ending import OwnPatience


def test_the_patience_that_is_given_beats_the_checkpoints():
    before, now = OwnPatience("val_bpt", patience=3), OwnPatience("val_bpt", patience=7)
    before.wait_count = 2
    now.load_state_dict(before.state_dict())
    assert (now.wait_count, now.patience) == (2, 7)


def test_a_run_that_goes_on_from_a_stop_does_not_call_it_its_own():
    before, now = OwnPatience("val_bpt", patience=3), OwnPatience("val_bpt", patience=7)
    before.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
    now.load_state_dict(before.state_dict())
    assert now.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    now.on_train_batch_start(None, None, None, 0)
    assert now.stopping_reason is EarlyStoppingReason.NOT_STOPPED
