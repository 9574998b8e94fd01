"""Adapters of experts in two processes: as in one on the same global batch, and the same to the bit in shares."""

import json

import killing
import pytest
import torch
from rounding import OF_SMALL, assert_moved_alike, turned
from safetensors.torch import load_file

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLAGS = (
    *("--test-run", "--samples", 0, "--precision", "fp32", "--block-size", 64, "--lora-experts", "--max-steps", 6),
    *("--eval-steps", 3, "--eval-iters", 2, "--save-steps", 3, "--control-every", 2, "--learning-rate", 1e-3),
)


@pytest.fixture(scope="module")
def runs(small_mixture, tmp_path_factory):
    """Folders of the same steps by one process, by two, and by two that share the frozen layers out."""
    where = tmp_path_factory.mktemp("experts")
    text = killing.texts(where / "text")
    found = {}
    for name, own in (("one", ()), ("two", ()), ("shares", ("--fsdp",))):
        line = [*FLAGS, *own, "--model", small_mixture, "--data-dir", text, "--output-dir", where / name]
        logs = [where / f"{name}{rank}.log" for rank in range(2)]
        alone = name == "one"
        line += ["--batch-size", 4 if alone else 2]
        children = [killing.fork(line, logs[0])] if alone else killing.fork_two(line, logs)
        codes = [killing.wait(child) for child in children]
        assert codes == [0] * len(codes), "".join(log.read_text() for log in logs if log.exists())
        found[name] = where / name
    return found


def weights(folder):
    return load_file(folder / "checkpoint-6" / "adapter_model.safetensors")


def test_two_processes_do_what_one_does(runs):
    one, two = weights(runs["one"]), weights(runs["two"])
    assert one.keys() == two.keys() and any("experts" in name for name in one)
    assert_moved_alike(one, two, 6, OF_SMALL)
    histories = [json.loads((runs[name] / "scu_history.json").read_text()) for name in ("one", "two")]
    for field in ("s", "lambda", "param_bpt", "data_bpt"):
        assert [r[field] for r in histories[0]] == pytest.approx(
            [r[field] for r in histories[1]], rel=turned(6, OF_SMALL)
        ), field


def test_shares_of_the_frozen_layers_change_no_bit(runs):
    one, other = weights(runs["two"]), weights(runs["shares"])
    assert {name: torch.equal(one[name], other[name]) for name in one} == dict.fromkeys(one, True)
