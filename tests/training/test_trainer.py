"""What a run sets in PyTorch besides its own numbers."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModel

from granite_scu.config.errors import UserError
from granite_scu.config.settings import TrainerConfig
from granite_scu.training import trainer
from granite_scu.training.trainer import OwnPatience, _lost, build_trainer, given_objects


def test_a_single_task_of_slurms_starts_the_others_itself(monkeypatch, group_of_one, tmp_path):
    """And continues from no checkpoint that Lightning finds in the working folder."""
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    task = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "me"}
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    two = SimpleNamespace(sharded=False, world_size=2, accelerator="cpu", devices=2, nodes=1, precision="32-true")
    given = {"steps": 1, "eval_steps": None, "callbacks": [], "loggers": [], "plugin": TorchCheckpointIO()}
    given["folder"] = tmp_path / "run"
    trainer = build_trainer(TrainerConfig(), two, **given)
    assert trainer.world_size == 2 and trainer.strategy.launcher is not None
    assert trainer._checkpoint_connector._hpc_resume_path is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a name that PyTorch has given up
        assert not DistributedDataParallel(torch.nn.Linear(1, 1), **trainer.strategy._ddp_kwargs).broadcast_buffers


def test_processes_that_do_not_reach_one_another_are_told_of_the_interface():
    refused = "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] timed out, remote=[127.0.1.1]:4321"
    assert "set GLOO_SOCKET_IFNAME" in _lost(RuntimeError(refused))


@pytest.mark.parametrize("kind", ["opt", "gptj", "gpt_neo", "falcon", "mpt", "llama"])
def test_layers_are_shared_out_whatever_the_decoder_calls_them(monkeypatch, kind):
    with torch.device("meta"):
        decoder = AutoModel.from_config(AutoConfig.for_model(kind))
    wrapped = []
    monkeypatch.setattr(trainer, "fully_shard", lambda module, **_: wrapped.append(module))
    trainer.shard(decoder, None)
    *layers, root = wrapped
    assert root is decoder and len(layers) == decoder.config.num_hidden_layers and len({*map(type, layers)}) == 1


@pytest.mark.parametrize(
    ("of_the_user", "segments"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
    ],
)
def test_segments_of_a_gpus_memory_grow_unless_the_user_says_otherwise(of_the_user, segments):
    others = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    code = "import os, granite_scu; print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    done = subprocess.run([sys.executable, "-c", code], env=others | of_the_user, capture_output=True, text=True)
    assert done.stdout.strip() == segments


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"class_path": "nope.Foo"}, "'nope.Foo': No module named 'nope'"),
        ({"class_path": "EarlyStopping"}, "the following arguments are required: monitor"),
        # The class itself refuses it, when it is made.
        ({"class_path": "EarlyStopping", "init_args": {"monitor": "val_bpt", "mode": "x"}}, "min, max, got x"),
        (3, "Not a valid subclass of Callback. Got value: 3 .*"),
    ],
)
def test_a_callback_that_cannot_be_made_is_the_users_and_the_cause_alone_is_said(described, words):
    with pytest.raises(UserError, match=f"^--trainer.callbacks: .*{words}$"):
        given_objects(TrainerConfig(callbacks=[described]))


def test_the_patience_that_is_given_beats_the_checkpoints():
    before, now = OwnPatience(3), OwnPatience(7)
    before.wait_count = 2
    now.load_state_dict(before.state_dict())
    assert (now.wait_count, now.patience) == (2, 7)


def test_a_run_that_goes_on_from_a_stop_does_not_call_it_its_own():
    before, now = OwnPatience(3), OwnPatience(7)
    before.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
    now.load_state_dict(before.state_dict())
    assert now.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    now.on_train_batch_start(None, None, None, 0)
    assert now.stopping_reason is EarlyStoppingReason.NOT_STOPPED


def test_with_a_budget_only_validations_within_it_count():
    """Lambda pulls the adapter back into its budget, which costs bits: that is no reason to stop."""
    within = iter([False, False, False, True, True, True])
    stopper = OwnPatience(1, lambda: next(within))
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING), sanity_checking=False, fast_dev_run=False, should_stop=False,
        strategy=SimpleNamespace(reduce_boolean_decision=lambda stop, all: stop), current_epoch=0, world_size=1,
    )  # fmt: skip
    stops = []
    for bits in (2.0, 2.1, 2.2, 2.4, 2.3, 2.35):
        trainer.callback_metrics = {"val_bpt": torch.tensor(bits)}
        stopper.on_validation_end(trainer, None)
        stops.append(trainer.should_stop)
    assert stops == [False, False, False, False, False, True]
