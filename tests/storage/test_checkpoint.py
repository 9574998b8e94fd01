"""Checkpoints that PEFT loads as they lie, and that a run continues from."""

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import killing
import lightning as L
import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig
from granite_scu.model import loading, saved_adapter
from granite_scu.storage import checkpoint_list, manifest
from granite_scu.storage.checkpoint import AdapterCheckpointIO, check_state, load_state, save_adapter
from granite_scu.storage.checkpoint_list import STATE, prune
from granite_scu.storage.run_folder import BEST_ADAPTER, RunFolder


def find(resume, folder):
    return checkpoint_list.find(RunFolder(folder), resume)


@pytest.fixture
def trained(make_module, make_batches, fit, tmp_path):
    """A module after a few steps, and the checkpoint folder that its Trainer wrote."""
    module = make_module()
    io = AdapterCheckpointIO(module)
    trainer = fit(module, make_batches(3), plugins=[io])
    folder = tmp_path / "run" / "checkpoint-3"
    trainer.save_checkpoint(folder)
    return module, folder


def nats(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], use_cache=False).logits


def test_a_checkpoint_is_a_folder_with_an_adapter_and_a_state(trained):
    module, folder = trained
    assert find(str(folder), "elsewhere") == folder
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        STATE,
    ]
    base = sum(p.numel() for p in module.model.parameters() if not p.requires_grad)
    assert (folder / "adapter_model.safetensors").stat().st_size < 4 * base


def test_the_best_adapter_so_far_is_kept_with_it(trained):
    module, folder = trained
    (folder.parent / BEST_ADAPTER).mkdir()
    (folder.parent / BEST_ADAPTER / "adapter_model.safetensors").write_bytes(b"best")
    AdapterCheckpointIO(module).save_checkpoint({}, folder.parent / "checkpoint-4")
    kept = folder.parent / "checkpoint-4" / BEST_ADAPTER / "adapter_model.safetensors"
    assert kept.read_bytes() == b"best" and manifest.damage(folder.parent / "checkpoint-4") is None


def test_a_state_that_no_run_could_continue_from_is_refused_when_it_is_saved(tmp_path):
    states = {"callbacks": {"Mine": {"best": np.float64(1)}}}
    with pytest.raises(UserError, match="the state of Mine holds more than numbers, texts and tensors"):
        AdapterCheckpointIO().save_checkpoint(states, tmp_path / "checkpoint-4")


def test_peft_alone_loads_the_adapter_as_it_lies(trained, make_batches):
    module, folder = trained
    base = loading.load_model(BaseConfig(module.base.name), torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, folder)
    (batch,) = make_batches(1)
    with torch.no_grad():  # but for the order in which our layers on a CPU take their sums
        torch.testing.assert_close(nats(loaded, batch), nats(module.model.eval(), batch))


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


def save_in_a_fork(io, state, folder, prepare) -> int:
    """Save a checkpoint and prune to one, in a child; returns its exit code, 1 for an error of the system."""
    child = os.fork()
    if not child:
        code = 2
        try:
            prepare()
            io.save_checkpoint(state, folder / "checkpoint-6")
            prune(RunFolder(folder), keep=1)
            code = 0
        except OSError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(lambda: os._exit(9), id="crash"),
        pytest.param(killing.fail_with(killing.FULL), id="full", marks=pytest.mark.slow),
    ],
)
def test_wherever_a_save_is_cut_short_a_whole_checkpoint_is_left(trained, tmp_path, strike):
    """At each of its calls that change the file system, one after the other."""
    module, folder = trained
    io, state = AdapterCheckpointIO(module), {name: v for name, v in load_state(folder).items() if name != "random"}
    struck, places = tmp_path / "struck", 0

    def strike_and_tell():
        struck.touch()
        strike()

    while places == 0 or struck.exists():
        struck.unlink(missing_ok=True)
        places += 1
        run = shutil.copytree(folder.parent, tmp_path / f"run{places}")
        save_in_a_fork(io, state, run, killing.at_change(run, places, strike_and_tell))
        newest = find("last", run)
        assert newest.name in ("checkpoint-3", "checkpoint-6")
        assert load_state(newest)["global_step"] == 3
    assert places > 15
    assert [path.name for path in RunFolder(run).checkpoints()] == ["checkpoint-6"]


@pytest.fixture
def several(tmp_path):
    """A run folder with three small checkpoints that are whole."""
    for step in (900, 1000, 200):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "best").mkdir(parents=True)
        for name in (STATE, "adapter_model.safetensors", "adapter_config.json", "best/validation.json"):
            (folder / name).write_bytes(f"{name} {step}".encode())
        manifest.write(folder)
    return tmp_path


def test_a_checkpoint_is_of_the_run_folder_that_it_lies_in_and_of_none_above(several):
    """Where it counts as its own, ``--overwrite`` drops what is newer, and the run writes there."""
    named = str(several / "checkpoint-900")
    assert checkpoint_list.lies_in(RunFolder(several), named)
    assert not checkpoint_list.lies_in(RunFolder(several.parent), named)


@pytest.mark.parametrize("resume", ["last", "auto"])
def test_last_and_auto_name_the_newest_checkpoint(several, resume):
    assert find(resume, several).name == "checkpoint-1000"


def test_a_damaged_one_is_passed_over_and_named(several, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("granite_scu"), "propagate", True)
    (several / "checkpoint-1000" / "best" / "validation.json").write_bytes(b"another")
    assert find("last", several).name == "checkpoint-900"
    assert "checkpoint-1000: best/validation.json is damaged; continuing from checkpoint-900 instead" in caplog.text
    with pytest.raises(UserError, match=r"best/validation\.json is damaged; continue from another, or from the last"):
        find(str(several / "checkpoint-1000"), several)


def test_without_a_whole_one_nothing_goes_on(several):
    for folder in RunFolder(several).checkpoints():
        (folder / STATE).unlink()
    for resume in ("last", "auto"):  # auto does not begin again what may only have to be mended
        with pytest.raises(UserError, match=f"none in .* is intact .*checkpoint-200: {STATE} is missing"):
            find(resume, several)


def test_a_manifest_that_names_nothing_makes_nothing_whole(several):
    (several / "checkpoint-1000" / manifest.NAME).write_text('{"files": {}}')
    with pytest.raises(UserError, match=f"manifest.json does not name {STATE}"):
        find(str(several / "checkpoint-1000"), several)


def of_a_run() -> dict[str, Any]:
    """The parts of a state, empty, of which nothing is missing."""
    control = {"name": "pi", "latest": {}, "ticks": 0}
    numbers = {"global_step": 3, "epoch": 0, "micro_batches": 12}
    groups = {"frozen": {}, "settings": {}, "state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {}}
    rest = {"pytorch-lightning_version": L.__version__, "random": {"python": (), "numpy": (), "cpu": torch.zeros(1)}}
    return numbers | groups | rest | {"callbacks": {"ShannonControl": control}}


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({}, "global_step"),
        ([], "global_step"),
        ({"global_step": "3"}, "global_step"),
        ({"global_step": 3, "epoch": 0, "micro_batches": None}, "micro_batches"),
        (of_a_run() | {"pytorch-lightning_version": "[]"}, "pytorch-lightning_version"),
    ],
)
def test_a_state_of_no_run_is_refused_by_what_it_lacks(state, place):
    check_state(of_a_run(), Path("checkpoint-3"))  # which is not refused
    with pytest.raises(UserError, match=f"{STATE} is of no run \\({place} is missing, or of another kind"):
        check_state(state, Path("checkpoint-3"))


def test_auto_begins_where_there_is_no_checkpoint(tmp_path):
    assert find("auto", tmp_path) is None


@settings(max_examples=40)
@given(data=st.data())
def test_damage_to_any_byte_shows(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    contents = data.draw(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3))
    for number, content in enumerate(contents):
        (folder / f"file{number}").write_bytes(content)
    manifest.write(folder)
    assert manifest.damage(folder) is None
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(whole[:place] if cut else whole[:place] + bytes([whole[place] ^ 1 << 5]) + whole[place + 1 :])
    assert manifest.damage(folder) is not None


def test_a_file_that_the_disk_does_not_give_back_is_damage(several, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(manifest, "sha256", broken)
    assert manifest.damage(several / "checkpoint-900") == "adapter_config.json cannot be read (Input/output error)"


@pytest.mark.parametrize("name", [STATE, "best/validation.json", "best/more", manifest.NAME])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(several, name):
    newest = several / "checkpoint-1000"
    (newest / name).unlink(missing_ok=True)
    os.mkfifo(newest / name)
    with pytest.raises(UserError, match=rf"{name}: is neither a file nor a folder|no {STATE} in it"):
        find(str(newest), several)
    if name != "best/more":  # which no manifest names, and the folder's own check refuses
        assert find("last", several).name == "checkpoint-900"


@contextlib.contextmanager
def somebody_else():
    """Whom modes keep out, which they do not keep root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("name", [STATE, "adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(several, name):
    with tempfile.TemporaryDirectory() as place:  # pytest's own nobody else may enter
        os.chmod(place, 0o755)
        folder = Path(shutil.copytree(several / "checkpoint-900", f"{place}/checkpoint-900"))
        (folder / name).chmod(0o600 if os.geteuid() == 0 else 0)
        reads = [
            lambda: find(str(folder), place),
            lambda: load_state(folder) if name == STATE else saved_adapter.find(folder),
        ]
        for read in reads:
            with pytest.raises(UserError, match=rf"{name}:? cannot be read \(Permission denied"), somebody_else():
                read()


def test_files_that_came_later_are_no_damage(several):
    (several / "checkpoint-900" / ".DS_Store").write_text("")
    assert manifest.damage(several / "checkpoint-900") is None


def test_the_only_whole_checkpoint_is_never_removed(several):
    (several / "checkpoint-1000" / STATE).write_bytes(b"")
    (several / "checkpoint-900" / STATE).unlink()
    prune(RunFolder(several), keep=1)
    assert [path.name for path in RunFolder(several).checkpoints()] == [
        "checkpoint-200",
        "checkpoint-900",
        "checkpoint-1000",
    ]
    shutil.rmtree(several / "checkpoint-900")
    shutil.copytree(several / "checkpoint-200", several / "checkpoint-950")
    prune(RunFolder(several), keep=1)
    assert [path.name for path in RunFolder(several).checkpoints()] == ["checkpoint-950", "checkpoint-1000"]


def test_every_generator_goes_on_where_it_was(trained):
    _, folder = trained
    AdapterCheckpointIO().load_checkpoint(folder)
    draw = lambda: (random.random(), np.random.rand(), torch.rand(()).item())  # noqa: E731
    first = draw()
    assert draw() != first
    AdapterCheckpointIO().load_checkpoint(folder)
    assert draw() == first


@pytest.mark.parametrize(("resume", "problem"), [("last", "holds no checkpoint"), ("./nowhere", "no state.ckpt in it")])
def test_a_checkpoint_that_is_not_there_is_refused(tmp_path, resume, problem):
    with pytest.raises(UserError, match=f"--resume-from-checkpoint {resume}: .*{problem}"):
        find(resume, tmp_path)


def test_a_run_folder_in_place_of_a_checkpoint_is_put_right(several):
    with pytest.raises(UserError, match=rf"no {STATE} in it\); the newest of that run is last --output-dir {several}"):
        find(str(several), "elsewhere")


@pytest.mark.parametrize("damage", [b"", b"no checkpoint", None])
def test_a_damaged_state_is_refused(trained, damage):
    _, folder = trained
    whole = (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(UserError, match=f"--resume-from-checkpoint .*: {STATE} is damaged"):
        load_state(folder)


class Runs:
    """Its pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_state_with_code_in_it_is_refused_and_runs_none(tmp_path):
    torch.save({"global_step": Runs(tmp_path / "ran")}, tmp_path / STATE)
    with pytest.raises(UserError, match=f"{STATE} is damaged"):
        load_state(tmp_path)
    assert not (tmp_path / "ran").exists()
