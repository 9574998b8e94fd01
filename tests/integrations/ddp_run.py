"""A run of either trainer, for torchrun: each process writes the ticks that it saw."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from granite_scu.config import settings
from granite_scu.config.settings import TINY_MODEL
from granite_scu.data.blocks.packing import padding_of
from granite_scu.evaluation import general_text
from granite_scu.integrations.transformers import ShannonCallback
from granite_scu.model.loading import load_tokenizer
from granite_scu.training.callbacks.drift import DriftMeter
from granite_scu.training.callbacks.shannon_control import ShannonControl
from granite_scu.training.callbacks.throughput import Stopwatch
from granite_scu.training.module import GraniteModule

RATE, EVERY, ACCUMULATE, CLIP, BUDGET, TARGET, N, STEPS = 1e-2, 2, 2, 0.2, 0.002, 0.02, 1000, 8
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def in_transformers(model: str, examples: list[dict], folder: str, batch: int, general: str) -> list[dict]:
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules="all-linear"))
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=ACCUMULATE,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    held = {"max_drift": BUDGET, "general_data": [general]} if general else {"target_s": TARGET}
    callback = ShannonCallback(control_every=EVERY, gradient_clip=CLIP, n_tokens=N, **held)
    tokenizer = load_tokenizer(TINY_MODEL)
    trainer = Trainer(adapted, args, train_dataset=examples, callbacks=[callback], processing_class=tokenizer)
    trainer.train()
    ticks = [record for record in trainer.state.log_history if "scu/s" in record]
    return [{name.removeprefix("scu/"): value for name, value in tick.items()} for tick in ticks]


class Texts(L.LightningDataModule):
    """This process's rows of each micro-batch."""

    def __init__(self, examples: list[dict], batch: int) -> None:
        super().__init__()
        starts = range(batch * RANK, len(examples), batch * WORLD)
        self.batches = [self.stacked(examples[start : start + batch]) for start in starts]

    @staticmethod
    def stacked(rows: list[dict]) -> dict:
        parts = {"input_ids": slice(None, -1), "labels": slice(1, None)}
        return {name: torch.stack([row[name][part] for row in rows]) for name, part in parts.items()}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)


def in_lightning(model: str, examples: list[dict], folder: str, batch: int, general: str) -> list[dict]:
    torch.manual_seed(0)
    config, meters, ticks, drift = settings.ControlConfig(target_s=TARGET, every=EVERY), [], [], None
    if general:
        config = settings.holding_drift(settings.ControlConfig(every=EVERY), BUDGET, ())
        tokenizer = load_tokenizer(TINY_MODEL)
        read = general_text.read(Path(general), tokenizer)
        meters = [DriftMeter(lambda *_: read, BUDGET, (1e-3, 1e3), 64, 256, padding_of(tokenizer))]
        drift = meters[0].plant
    law = config.law()
    optimizer = settings.OptimizerConfig(RATE, "constant", warmup_steps=0, gradient_clip=CLIP)
    lora, prior = settings.LoraConfig(4, 8.0), settings.PriorConfig(n_tokens=N)
    base = settings.BaseConfig(model)
    module = GraniteModule(base, lora, optimizer, prior, STEPS)
    module.configure_model()
    listener = SimpleNamespace(on_tick=lambda tick, *_: ticks.append(dict(tick.record)))
    loop = ShannonControl(law, EVERY, Stopwatch(), listeners=[listener], drift=drift)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=DDPStrategy(broadcast_buffers=False) if WORLD > 1 else "auto",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[*meters, loop.stopwatch, loop],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=Texts(examples, batch))
    return [{name: value for name, value in tick.items() if name != "tokens_per_s"} for tick in ticks]


def main(trainer: str, model: str, rows: str, folder: str, batch: str, general: str = "") -> None:
    examples = [{name: torch.tensor(row[name]) for name in row} for row in json.loads(Path(rows).read_text())]
    train = {"lightning": in_lightning, "transformers": in_transformers}[trainer]
    ticks = train(model, examples, folder, int(batch), general)
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"{RANK}.json").write_text(json.dumps(ticks))


if __name__ == "__main__":
    main(*sys.argv[1:])
