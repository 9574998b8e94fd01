"""TRL's SFTTrainer with packing and a loss on completions alone: what is counted, and that S is held."""

import math
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rounding import OF_SMALL, rounding
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from granite_scu.integrations.transformers import ShannonCallback

trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sft_with_trl.py"
PAIRS = [{"prompt": "Say " + "a" * (3 * i % 17), "completion": " b c" * (1 + i % 5)} for i in range(24)]


@pytest.fixture
def sft(tmp_path):
    """An SFTTrainer of a small dense model on short pairs."""
    tokenizer = AutoTokenizer.from_pretrained(str(files("granite_scu.model") / "assets" / "tiny-granite-h"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes))

    def make(callbacks: list, strategy: str, held_out: Dataset | None = None, **more) -> trl.SFTTrainer:
        args = trl.SFTConfig(
            output_dir=str(tmp_path),
            packing=True,
            packing_strategy=strategy,
            max_length=64,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=1,
            learning_rate=2e-3,
            gradient_accumulation_steps=2,
            max_grad_norm=0,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **more,
        )
        return trl.SFTTrainer(
            model,
            args,
            train_dataset=Dataset.from_list(PAIRS),
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules="all-linear"),
            callbacks=callbacks,
        )

    return make


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_it_counts_the_tokens_of_completions_in_packed_rows(strategy, sft, ticks):
    callback = ShannonCallback(0.1, control_every=1)
    trainer = sft([callback], strategy)
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert sum(counts) < sum(batch["input_ids"].numel() for batch in batches) / 1.5  # prompts are not supervised
    expected = sum(nats(trainer.model, batch) for batch in batches[:2]) / sum(counts[:2]) / math.log(2)
    trainer.train()
    assert callback.state()["attributes"]["saved"]["n_tokens"] == sum(counts)
    first, *_, last = ticks(trainer)
    assert first["tokens"] == sum(counts[:2])
    assert first["data_bpt"] == pytest.approx(
        expected, rel=rounding(OF_SMALL)
    )  # of before the step, where the adapter is zero
    assert last["tokens"] == sum(counts)


def test_a_loss_that_is_no_cost_of_the_data_is_refused(sft):
    with pytest.raises(ValueError, match=r'loss_type=dft: is no cost .*; use SFTTrainer, with loss_type="nll"'):
        sft([ShannonCallback(0.1)], "wrapped", loss_type="dft").train()


@torch.no_grad()
def nats(model, batch) -> float:
    """Summed cross-entropy of a micro-batch by the model's own logits."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return float(F.cross_entropy(model(**inputs).logits[0, :-1], batch["labels"][0, 1:], reduction="sum"))


@pytest.mark.slow
def test_the_example_holds_s_at_its_setpoint(tmp_path):
    """SFTTrainer on the embedded model, S* = 10 %: the last four ticks within 25 %, their mean within 10 %."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    base = str(files("granite_scu.model") / "assets" / "tiny-granite-h")
    line = [sys.executable, str(EXAMPLE), base, "60"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    held = [float(s) / 100 for s in re.findall(r"S +([\d.]+)%", done.stdout)]
    assert len(held) == 12
    assert held[-4:] == pytest.approx([0.1] * 4, rel=0.25)
    assert sum(held[-4:]) / 4 == pytest.approx(0.1, rel=0.1)
