"""A run of a Trainer, for torchrun: each process writes the ticks that it saw."""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from granite_scu.config.settings import TINY_MODEL
from granite_scu.integrations.transformers import ShannonCallback
from granite_scu.model.loading import load_tokenizer


def main(model: str, rows: str, folder: str, batch: str, general: str = "") -> None:
    examples = [{name: torch.tensor(row[name]) for name in row} for row in json.loads(Path(rows).read_text())]
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules="all-linear"))
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    held = {"max_drift": 0.002, "general_data": [general]} if general else {"held_out": examples[:8]}
    callback = ShannonCallback(control_every=2, gradient_clip=0.2, **held)
    tokenizer = load_tokenizer(TINY_MODEL)
    trainer = Trainer(adapted, args, train_dataset=examples, callbacks=[callback], processing_class=tokenizer)
    trainer.train()
    ticks = [record for record in trainer.state.log_history if "scu/s" in record]
    Path(folder, f"{args.process_index}.json").write_text(json.dumps(ticks))


if __name__ == "__main__":
    main(*sys.argv[1:])
