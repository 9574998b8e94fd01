"""What other tools call the settings: the table of the page about them, and the answer to their flags."""

# ruff: noqa: E501 (a row of the table is a line)

import re

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
    ("gradient checkpointing", "on with several GPUs, no key", "`gradient_checkpointing`", "`use_gradient_checkpointing`", "`gradient_checkpointing`", "`--gradient-checkpointing` auto, selective, on or off; by default where the run would not fit"),
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
"""A setting a row: what it is, litgpt's name, axolotl's, unsloth's and TRL's, and what is here; names stand in
backticks."""

# fmt: off
FURTHER = {
    "`--model`": "pretrained_model_name_or_path model_path model_id",
    "`--data-dir`": "data dataset datasets dataset_dir dataset_path data_path train_file train_data training_data",
    "`--data-dir`, `hf:owner/name` for one of the hub": "dataset_name",
    "`--data-dir hf:owner/name:config`": "dataset_config dataset_config_name",
    "`--text-column`": "dataset_text_field text_field content_key",
    "`--validation-data`": "eval_dataset eval_data eval_file validation_file valid_data",
    "`--test-data`": "test_file test_dataset",
    "`--held-out-share`": "val_size val_set_size val_split val_split_fraction validation_split test_size",
    "`--output-dir`": "out_dir output output_path save_dir save_path",
    "`--output-dir`; `--adapter` to start from one": "adapter_path",
    "`--adapter`": "adapter_file adapter_name_or_path lora_path resume_adapter_file",
    "`--resume-from-checkpoint` last, auto or a folder": "resume resume_from continue continue_from_checkpoint",
    "`--overwrite`": "overwrite_output_dir",
    "`--config`": "recipe config_file",
    "`--learning-rate`": "lr",
    "`--warmup-steps`": "warmup num_warmup_steps",
    "`--max-steps`": "iters num_iters max_iters max_train_steps num_steps",
    "`--batch-size`": "train_batch_size per_gpu_train_batch_size",
    "`--eval-batch-size`": "per_device_eval_batch_size",
    "`--gradient-accumulation-steps`": "grad_accum grad_accumulation grad_accumulation_steps accumulate_grad_batches",
    "`--block-size`": "cutoff_len max_seq_len max_len max_tokens model_max_length context_length seq_len seq_length",
    "`--gradient-clip`": "grad_clip clip_grad_norm max_norm",
    "`--gradient-checkpointing`": "grad_checkpoint",
    "`--adam-beta2`": "beta2",
    "no: AdamW's beta1 is 0.9 and its epsilon 1e-8": "adam_beta1 adam_epsilon",
    "`--lora-r`": "lora_rank rank lora_dim",
    "`--lora-alpha`": "alpha",
    "`--lora-dropout`": "dropout",
    "`--lora-targets`": "lora_target lora_modules lora_attn_modules lora_layers",
    "no: every layer gets an adapter; `--lora-targets` names those that do": "num_layers",
    "no: plain LoRA, its B at 0 at the start": "modules_to_save init_lora_weights bias lora_bias peft_type task_type",
    "no: LoRA only": "fine_tune_type finetuning_type train_type",
    "no: supervised fine-tuning only": "stage",
    "`--4bit-quantization`; no 8 bits": "load_in_8bit quantization quantization_bit quantize",
    "`--precision`": "torch_dtype mixed_precision compute_dtype",
    "`--attn`": "attn_implementation flash_attn flash_attention use_flash_attention",
    "`--chat-template`": "template",
    "`--system`": "default_system system_prompt",
    "`--loss-on`; the chat template says where an answer begins": "response_template instruction_template",
    "`--packing`": "group_by_length pad_to_sequence_len",
    "`--eval-steps`": "eval_strategy evaluation_strategy steps_per_eval eval_every",
    "`--eval-iters`": "val_batches max_eval_samples",
    "`--save-steps`": "save_every save_strategy",
    "`--logging-steps`": "steps_per_report log_every",
    "`--logger`": "report_to wandb",
    "no: TensorBoard's files are always written": "tensorboard",
    "`--logger wandb`, which reads WANDB_PROJECT and WANDB_NAME": "wandb_project wandb_name run_name",
    "`--num-workers`": "dataloader_num_workers preprocessing_num_workers",
    "`--gpus`, or `--multi-gpu` for all": "devices num_gpus num_gpu nproc_per_node num_processes",
    "`--fsdp`": "deepspeed",
    "`--accelerator`": "device device_map",
    "`--accelerator cpu`": "use_cpu cpu no_cuda",
    "no: a run always trains, validates and tests": "do_train do_eval train test",
    "no: the adapter that validated best is always kept": "load_best_model_at_end",
    "no: all records are read; give a shorter file": "max_samples max_train_samples",
    "no: the model's own": "tokenizer tokenizer_name tokenizer_path",
    "no: code that comes with a model is never run": "trust_remote_code",
    "no: HF_TOKEN, or `hf auth login`": "token hf_token hub_token",
    "no: no noise is added": "neftune_noise_alpha",
    "`granite-scu generate`, after the run": "prompt temperature max_new_tokens",
}
# fmt: on
"""Further names, of LLaMA-Factory, mlx-lm, torchtune, transformers and torchrun among others, by what is here."""


def _names() -> dict[str, str]:
    """What is here by each name there, without the groups of dotted ones."""
    found: dict[str, str] = {}
    for _, *cells, here in ROWS:
        for name in re.findall("`([^`]+)`", " ".join(cells)):
            found.setdefault(re.split(r"[:( =]", name)[0].rpartition(".")[2], here)
    return found | {name: here for here, names in FURTHER.items() for name in names.split()}


NAMES = _names()


def answer(flag: str) -> str | None:
    """What there is here in place of a flag of another tool; None where no tool is known to have it.

    >>> answer("--load-in-4bit"), answer("--optim")
    ("another tool's; here it is --4bit-quantization; no 8 bits", "another tool's; not here: always AdamW")
    """
    here = NAMES.get(flag.lstrip("-").replace("-", "_").rpartition(".")[2])
    if here is None:
        return None
    none = here.startswith("no: ")
    return f"another tool's; {'not here: ' if none else 'here it is '}{here.removeprefix('no: ')}".replace("`", "")
