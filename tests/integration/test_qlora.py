"""QLoRA for real, on the CPU: nf4 through bitsandbytes, from the first step to the scoring of what was saved."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

SHORT = (
    *("--4bit-quantization", "--batch-size", "4", "--save-steps", "2", "--eval-steps", "2", "--eval-iters", "2"),
    *("--learning-rate", "5e-3"),
)


@pytest.fixture(scope="module")
def run(trained) -> Path:
    return trained(*SHORT)


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_every_adapter_is_trained_and_helps(run):
    raised = {name: tensor for name, tensor in adapter(run).items() if ".lora_B." in name}
    assert len(raised) == 28 and all(bool(tensor.any()) for tensor in raised.values())
    metrics = read_json(run / "scu_metrics.json")
    assert metrics["skipped_steps"] == 0
    assert metrics["adapter_test_bpt"] < metrics["base_test_bpt"]


def test_what_is_saved_is_the_adapter_alone_and_no_quantised_weight(run):
    state = torch.load(run / "checkpoint-2" / "state.ckpt", weights_only=True)["state_dict"]
    assert len(state) == 2 * 28 and all(".lora_" in name for name in state)
    assert {tensor.dtype for tensor in adapter(run).values()} == {torch.float32}


def test_a_resumed_run_ends_as_one_that_was_not_stopped(train, run):
    resumed = train(*SHORT, "--resume-from-checkpoint", run / "checkpoint-2")
    assert (resumed / "adapter_model.safetensors").read_bytes() == (run / "adapter_model.safetensors").read_bytes()
    names = ("step", "s", "lambda", "data_bpt", "param_bpt", "grad_norm")
    one, two = (
        [[record[name] for name in names] for record in read_json(folder / "scu_history.json")]
        for folder in (run, resumed)
    )
    assert one == two


def test_it_is_scored_on_the_base_that_it_learned_on(run, capsys):
    from granite_scu.cli.main import main

    def scored(*argv) -> list[float]:
        assert main(["eval", "--json", "--samples", "0", "--precision", "fp32", str(run), *argv]) == 0
        found = json.loads(capsys.readouterr().out)
        return [found["quantize_4bit"], *(model["bits_per_token"] for model in found["models"])]

    in_4_bits, base, adapted = scored()
    whole_4_bits, whole_base, _ = scored("--no-4bit-quantization")
    assert (in_4_bits, whole_4_bits) == (True, False)
    assert adapted < base and base != pytest.approx(whole_base, abs=1e-4)
