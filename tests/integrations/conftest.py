"""Trainers of transformers on the small model of the other tests."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from granite_scu.config.settings import TINY_MODEL
from granite_scu.evaluation.general_text import Document, GeneralText
from granite_scu.model.loading import load_tokenizer

RANK, ALPHA = 4, 8.0


@pytest.fixture(autouse=True, scope="module")
def _nothing_to_collect():
    """Accelerate collects garbage whenever a Trainer begins, which takes longer than the rest of a test here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_MODEL)


@pytest.fixture(scope="module")
def text() -> GeneralText:
    """General text of the small models' few words."""
    rows = torch.randint(2, 60, (24, 26), generator=torch.Generator().manual_seed(7)).tolist()
    return GeneralText(tuple(Document(tuple(row), (False, *[True] * 25)) for row in rows), "auto")


@pytest.fixture
def examples(make_batches):
    """Micro-batches of two as transformers wants them, row by row: labels are not shifted."""

    def make(count: int) -> list[dict]:
        rows = []
        for batch in make_batches(count):
            ids = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1)
            labels = torch.cat([torch.full_like(ids[:, :1], -100), batch["labels"]], 1)
            rows += [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
        return rows

    return make


@pytest.fixture
def adapted(small_granite):
    """The small model with an adapter of PEFT's; equal arguments give equal weights."""

    def make(**lora):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(small_granite, dtype=torch.float32)
        settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        return get_peft_model(model, LoraConfig(**(settings | lora)))

    return make


@pytest.fixture
def trainer(tmp_path):
    """A Trainer on the CPU with SGD-like plain settings."""

    def make(model, rows, callback, *, cls=Trainer, tokenizer=None, **arguments):
        settings = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "train_sampling_strategy": "sequential",
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        args = TrainingArguments(**(settings | arguments))
        callbacks = [callback] if callback else []
        return cls(model, args, train_dataset=rows, callbacks=callbacks, processing_class=tokenizer)

    return make


@pytest.fixture
def ticks():
    """The records of a Trainer's ticks."""

    def of(trainer) -> list[dict]:
        records = [record for record in trainer.state.log_history if "scu/s" in record]
        return [{name.removeprefix("scu/"): value for name, value in record.items()} for record in records]

    return of
