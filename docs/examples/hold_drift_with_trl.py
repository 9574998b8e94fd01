"""Teach facts with TRL's SFTTrainer while drift is held at 5 %: python hold_drift_with_trl.py [MODEL] [STEPS]"""

import sys
from importlib.resources import files
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from granite_scu.integrations.transformers import ShannonCallback

model = sys.argv[1] if len(sys.argv) > 1 else str(files("granite_scu.model") / "assets" / "tiny-granite-h")
gpu, steps = torch.cuda.is_available(), int(sys.argv[2]) if len(sys.argv) > 2 else 100
pairs = [{"prompt": f"Explain {name}:\n", "completion": text[:600]} for name, text in topics.items()]
data, every = Dataset.from_list(pairs).train_test_split(8, seed=0), max(1, steps // 5)
best = {"load_best_model_at_end": True, "metric_for_best_model": "loss_in_budget", "greater_is_better": False}
trainer = SFTTrainer(
    model,
    SFTConfig(
        output_dir="hold_drift_with_trl",
        max_steps=steps,
        learning_rate=1e-3,
        max_length=256,
        router_aux_loss_coef=0.0,  # Granite 4.0 H Micro, 350M and 1B have no experts to balance
        max_grad_norm=0,  # the callback clips, after the gradient of lambda is added
        per_device_train_batch_size=2,
        **{"use_cpu": not gpu, "bf16": gpu, "eval_strategy": "steps", "eval_steps": every, "save_steps": every, **best},
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    callbacks=[ShannonCallback(max_drift="5%", general_tokens=2048, control_every=2)],
)
trainer.train()
last = trainer.state.log_history[-1]
print(f"step {trainer.state.best_global_step} is kept: drift {last['scu/drift_held_out']:.2%} on unseen general text")
