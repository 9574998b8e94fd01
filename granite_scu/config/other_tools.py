"""What other tools call the settings: the table of the page about them, and the answer to their flags."""

# ruff: noqa: E501 (a row of the table is a line)

import re

COLUMNS = ("what", "litgpt `finetune_lora`", "axolotl", "unsloth", "TRL `sft`", "here")

# fmt: off
ROWS = (
    ("base model", "`checkpoint_dir` (converted)", "`base_model`", "`model_name`", "`model_name_or_path`", "`--model`, a hub id or a folder"),
    ("learning rate", "`optimizer.init_args.lr`", "`learning_rate`", "as TRL", "`learning_rate`", "`--learning-rate`"),
    ("schedule", "cosine", "`lr_scheduler`", "as TRL", "`lr_scheduler_type`", "`--lr-scheduler` cosine, linear or constant"),
    ("warm-up", "`train.lr_warmup_steps`", "`warmup_steps`, `warmup_ratio`", "as TRL", "`warmup_steps`", "`--warmup-steps`, no share; `plan` prints the steps"),
    ("optimizer", "`optimizer`", "`optimizer`", "`optim`", "`optim`", "no: always AdamW"),
    ("weight decay", "`optimizer.init_args.weight_decay`", "`weight_decay`", "as TRL", "`weight_decay`", "`optimizer.weight_decay`"),
    ("gradient clipping", "no: refused", "`max_grad_norm`", "as TRL", "`max_grad_norm`", "`--gradient-clip`"),
    ("LoRA rank (alpha and dropout likewise)", "`lora_r`", "`lora_r`", "`r`", "`lora_r`", "`--lora-r`"),
    ("LoRA targets", "`lora_query`, `lora_key`, `lora_value`, `lora_projection`, `lora_mlp`, `lora_head`", "`lora_target_modules`, `lora_target_linear`", "`target_modules`", "`lora_target_modules`", "`--lora-targets` attention, mlp, mamba, all or names"),
    ("rsLoRA", "no", "`peft_use_rslora`", "`use_rslora`", "`use_rslora`", "`--rslora`"),
    ("DoRA", "no", "`peft_use_dora`", "`use_dora`", "`use_dora`", "no: λ counts a plain sum of products B A"),
    ("all weights, no LoRA", "`finetune_full`", "no `adapter`", "`full_finetuning`", "no `use_peft`", "no: adapters only"),
    ("start from an adapter", "no", "`lora_model_dir`", "`model_name` is the adapter", "`peft` in Python", "`--adapter`, any plain LoRA adapter of PEFT"),
    ("batch size per device", "`train.micro_batch_size`", "`micro_batch_size`", "as TRL", "`per_device_train_batch_size`", "`--batch-size`, in blocks; `--auto-batch-size` finds it"),
    ("accumulation", "`train.global_batch_size`, samples a step", "`gradient_accumulation_steps`", "as TRL", "`gradient_accumulation_steps`", "`--gradient-accumulation-steps`"),
    ("sequence length", "`train.max_seq_length`", "`sequence_len`", "`max_seq_length`", "`max_length`", "`--block-size`"),
    ("longer samples", "truncated", "`excess_length_strategy`", "as TRL", "`truncation_mode`", "`--on-long` split, truncate, drop or error"),
    ("epochs", "`train.epochs`", "`num_epochs`", "as TRL", "`num_train_epochs`", "`--num-epochs`"),
    ("steps", "`train.max_steps`", "`max_steps`", "as TRL", "`max_steps`", "`--max-steps`; with both, whichever is reached first"),
    ("precision", "`precision`", "`bf16`, `fp16`", "`dtype`", "`bf16`, `fp16`, `dtype`", "`--precision` auto, bf16, fp16 or fp32; `--tf32`"),
    ("4 bits (QLoRA)", "`quantize: bnb.nf4-dq`", "`load_in_4bit`", "`load_in_4bit`", "`load_in_4bit`", "`--4bit-quantization`; no 8 bits"),
    ("gradient checkpointing", "on with several GPUs, no key", "`gradient_checkpointing`", "`use_gradient_checkpointing`", "`gradient_checkpointing`", "`--gradient-checkpointing` auto, on or off; by default where the run would not fit"),
    ("packing", "no", "`sample_packing`", "`packing`", "`packing`, `packing_strategy`", "`--packing`; `--isolate-documents` is the default"),
    ("chat template", "`data.prompt_style`", "`chat_template`, `chat_template_jinja`", "`get_chat_template`", "`chat_template_path`", "`--chat-template`; by default the tokenizer's own"),
    ("system prompt", "`data.prompt_style`", "`default_system_message`", "in the template", "in the template", "`--system`"),
    ("train on inputs", "`data.mask_prompt: false` (the default)", "`train_on_inputs`", "`train_on_responses_only`", "`completion_only_loss`, `assistant_only_loss`", "`--loss-on` completion or all"),
    ("early stopping", "no", "`early_stopping_patience`", "as TRL", "a callback", "`--early-stopping`"),
    ("seeds", "`seed`, `data.seed`", "`seed`", "`random_state`, `seed`", "`seed`, `data_seed`", "`--seed`; `--split-seed` for the division"),
    ("checkpoints", "`train.save_interval`", "`save_steps`, `save_total_limit`", "as TRL", "`save_steps`, `save_total_limit`", "`--save-steps`, `--keep`"),
    ("resume", "no: `finetune_full` only", "`resume_from_checkpoint`, `auto_resume_from_checkpoints`", "as TRL", "`trainer.train(resume_from_checkpoint=...)`", "`--resume-from-checkpoint` last, auto or a folder"),
    ("merge", "`merge_lora`, at the end of each run", "`axolotl merge-lora`", "`save_pretrained_merged`", "`merge_and_unload` of PEFT", "`granite-scu merge`, which checks the merged model"),
    ("push to the hub", "no", "`hub_model_id`", "`push_to_hub_merged`", "`push_to_hub`, `hub_model_id`", "`granite-scu publish`, after the run"),
)
# fmt: on
"""A setting a row, under the names of ``COLUMNS``; a name of a setting stands in backticks."""

SHORT = {
    "lr": "`--learning-rate`",
    "lora_rank": "`--lora-r`",
    "lora_target": "`--lora-targets`",
    "cutoff_len": "`--block-size`",
    "default_system": "`--system`",
    "devices": "`--gpus`, or `--multi-gpu` for all",
    "num_gpus": "`--gpus`, or `--multi-gpu` for all",
    "nproc_per_node": "`--gpus`, or `--multi-gpu` for all",
    "num_processes": "`--gpus`, or `--multi-gpu` for all",
    "load_in_8bit": "`--4bit-quantization`; no 8 bits",
    "quantization_bit": "`--4bit-quantization`; no 8 bits",
    "dataset": "`--data-dir`",
    "dataset_name": "`--data-dir`, `hf:owner/name` for one of the hub",
    "datasets": "`--data-dir`",
    "train_file": "`--data-dir`",
    "eval_dataset": "`--validation-data`",
    "validation_file": "`--validation-data`",
    "val_size": "`--held-out-share`",
    "val_set_size": "`--held-out-share`",
    "val_split_fraction": "`--held-out-share`",
    "per_device_eval_batch_size": "`--eval-batch-size`",
    "eval_strategy": "`--eval-steps`",
    "report_to": "`--logger`",
}
"""Further names, of LLaMA-Factory, transformers and torchrun among others."""


def _names() -> dict[str, str]:
    """What is here by each name there, without the groups of dotted ones."""
    found: dict[str, str] = {}
    for _, *cells, here in ROWS:
        for name in re.findall("`([^`]+)`", " ".join(cells)):
            found.setdefault(re.split(r"[:( =]", name)[0].rpartition(".")[2], here)
    return found | SHORT


NAMES = _names()


def answer(flag: str) -> str | None:
    """What to type here in place of a flag of another tool; None where no tool is known to have it.

    >>> answer("--load-in-4bit")
    '--4bit-quantization; no 8 bits'
    """
    here = NAMES.get(flag.lstrip("-").replace("-", "_").rpartition(".")[2])
    return None if here is None else here.replace("`", "")


def table() -> str:
    """The table of the page, in Markdown."""
    rows = (COLUMNS, ("---",) * len(COLUMNS), *ROWS)
    return "\n".join(f"| {' | '.join(row)} |" if row[0] != "---" else f"|{'|'.join(row)}|" for row in rows)
