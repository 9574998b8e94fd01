"""The run folder at the start of a run."""

import pytest

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.training.output_folder import open_run_folder
from granite_scu.training.recipe import prepare


def test_a_run_that_ended_there_after_the_first_check_is_not_overwritten(tmp_path):
    """Two runs start on one free folder; one of them trains while the other one still looks for its batch size."""
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"Line {number} of a text.\n" for number in range(300)))
    settings = {"base.name": "tiny-granite-h", "data.path": str(text), "data.block_size": 32, "trainer.max_steps": 4}
    more = {"run.output_dir": str(folder), "trainer.accelerator": "cpu", "control.target_s": 0.02, "control.every": 2}
    late = prepare(Request.from_dotted(settings | more))
    folder.mkdir()
    (folder / "training_config.json").write_text("the other run's")
    with pytest.raises(UserError, match="is not empty; choose another folder"):
        open_run_folder(late)
    assert (folder / "training_config.json").read_text() == "the other run's"
    late.folder.unlock()
