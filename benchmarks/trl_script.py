"""What a user of TRL writes for a hundred chats: trl_script.py MODEL CHATS OUT SETTINGS (JSON for SFTConfig)"""

import json
import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

model, chats, out, settings = *sys.argv[1:4], json.loads(sys.argv[4])
gpu = torch.cuda.is_available()
rank = settings.pop("rank", 16)
# The coefficient: TRL 1.16 balances the experts of every Granite hybrid, also of one that has none, and fails.
settings = {"router_aux_loss_coef": 0.0, **settings}
trainer = SFTTrainer(
    model,
    SFTConfig(output_dir=out, use_cpu=not gpu, bf16=gpu, save_strategy="no", report_to="none", **settings),
    train_dataset=load_dataset("json", data_files=chats, split="train"),
    peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model(out)
