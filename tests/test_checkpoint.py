"""Checkpoints that PEFT loads as they lie, and that a run goes on from."""

import json

import lightning as L
import peft
import pytest
import torch

from granite_scu.checkpoint import STATE, AdapterCheckpointIO, find, load_state, save_adapter
from granite_scu.config import BaseConfig
from granite_scu.errors import UserError
from granite_scu.model import loading


@pytest.fixture
def trained(make_module, make_batches, fit, tmp_path):
    """A module after a few steps, and the checkpoint folder that its Trainer wrote."""
    module, io = make_module(), AdapterCheckpointIO()
    io.module = module
    trainer = fit(module, make_batches(3), plugins=[io])
    folder = tmp_path / "run" / "checkpoint-3"
    trainer.save_checkpoint(folder)
    return module, folder


def nats(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], use_cache=False).logits


def test_a_checkpoint_is_a_folder_with_an_adapter_and_a_state(trained):
    module, folder = trained
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        STATE,
    ]
    base = sum(p.numel() for p in module.model.parameters() if not p.requires_grad)
    assert (folder / "adapter_model.safetensors").stat().st_size < 4 * base


def test_peft_alone_loads_the_adapter_as_it_lies(trained, make_batches):
    module, folder = trained
    base = loading.load_model(BaseConfig(module.base.name), torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, folder)
    (batch,) = make_batches(1)
    assert torch.equal(nats(loaded, batch), nats(module.model.eval(), batch))


def test_the_adapter_names_its_base_as_the_user_did(trained, tmp_path):
    module, _ = trained
    before = module.model.peft_config["default"].base_model_name_or_path
    save_adapter(module.model, tmp_path / "adapter", "tiny-granite-h")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "tiny-granite-h"
    assert module.model.peft_config["default"].base_model_name_or_path == before


def test_a_run_goes_on_from_the_folder(trained, make_module, make_batches, fit):
    module, folder = trained
    seen = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, resumed):
            seen.append((trainer.global_step, {n: u.b.detach().clone() for n, u in resumed.updates.items()}))

    fit(
        make_module(),
        make_batches(3),
        plugins=[AdapterCheckpointIO()],
        ckpt_path=folder,
        max_epochs=2,
        callbacks=[Watch()],
    )
    ((step, factors),) = seen
    assert step == 3
    assert all(torch.equal(factors[name], u.b) for name, u in module.updates.items())


def test_a_checkpoint_appears_whole_or_not_at_all(trained, tmp_path):
    module, _ = trained
    io = AdapterCheckpointIO()
    io.module = module
    with pytest.raises(Exception, match="pickle"):
        io.save_checkpoint({"what": lambda: None}, tmp_path / "checkpoint-9")
    assert not list(tmp_path.glob("*checkpoint-9*"))


def test_last_names_the_newest_checkpoint(tmp_path):
    for step in (900, 1000, 200):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert find("last", tmp_path).name == "checkpoint-1000"


def test_a_checkpoint_is_found_by_its_folder(trained):
    _, folder = trained
    assert find(str(folder), "elsewhere") == folder


@pytest.mark.parametrize(("resume", "problem"), [("last", "holds no checkpoint"), ("./nowhere", "no state.ckpt in it")])
def test_a_checkpoint_that_is_not_there_is_refused(tmp_path, resume, problem):
    with pytest.raises(UserError, match=f"--resume-from-checkpoint {resume}: .*{problem}"):
        find(resume, tmp_path)


@pytest.mark.parametrize("damage", [b"", b"no checkpoint", None])
def test_a_damaged_state_is_refused(trained, damage):
    _, folder = trained
    whole = (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(UserError, match=f"--resume-from-checkpoint .*: {STATE} is damaged"):
        load_state(folder)
