from granite_scu.callbacks.early_stopping import OwnPatience


def test_the_patience_that_is_given_beats_the_checkpoints():
    before, now = OwnPatience("val_bpt", patience=3), OwnPatience("val_bpt", patience=7)
    before.wait_count = 2
    now.load_state_dict(before.state_dict())
    assert (now.wait_count, now.patience) == (2, 7)
