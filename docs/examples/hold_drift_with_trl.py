"""Teach facts with TRL's SFTTrainer while drift is held at 2 %: python hold_drift_with_trl.py [MODEL] [STEPS]"""

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
        use_cpu=not gpu,
        bf16=gpu,
    ),
    train_dataset=Dataset.from_list(pairs),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    callbacks=[ShannonCallback(max_drift="2%", general_tokens=2048, control_every=2)],
)
trainer.train()
for tick in trainer.state.log_history:
    if "scu/drift" in tick:
        print(f"step {tick['step']:4}  drift {tick['scu/drift']:6.2%}  lambda {tick['scu/lambda']:.3g}")
print(f"drift on what the loop did not see: {trainer.state.log_history[-1]['scu/drift_held_out']:.2%}")
