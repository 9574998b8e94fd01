import re
from pathlib import Path

import pytest
from outcomes import refusal

from granite_scu.cli.script_flags import build_parser, translate
from granite_scu.config import other_tools

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from-other-tools.md"


def test_the_page_has_the_table():
    head = "| what | litgpt `finetune_lora` | axolotl | unsloth | TRL `sft` | here |\n|---|---|---|---|---|---|\n"
    rows = "\n".join(f"| {' | '.join(row)} |" for row in other_tools.ROWS)
    assert head + rows in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flag", "here"),
    [
        ("--lr", "--learning-rate"),
        ("--load-in-4bit", "--4bit-quantization"),
        ("--target_modules", "--lora-targets"),
        ("--devices", "--gpus"),
        ("--per_device_train_batch_size", "--batch-size"),
        ("--num_train_epochs", "--num-epochs"),
        ("--micro_batch_size", "--batch-size"),
        ("--sequence_len", "--block-size"),
        ("--lora_rank", "--lora-r"),
        ("--max_seq_length", "--block-size"),
        ("--sample_packing", "--packing"),
        ("--val_size", "--held-out-share"),
        ("--resume", "--resume-from-checkpoint"),
        ("--optim", "not here: always AdamW"),
        ("--iters", "--max-steps"),
        ("--tensorboard", "not here"),
    ],
)
def test_a_flag_of_another_tool_is_answered_by_the_one_here(flag, here):
    message = refusal(translate, [flag, "1"])
    assert flag.replace("_", "-") in message.replace("_", "-") and here in message


def test_what_it_answers_is_a_flag_here():
    known = {option for action in build_parser()._actions for option in action.option_strings}
    named = {flag for here in other_tools.NAMES.values() for flag in re.findall("--[a-z0-9-]+", here)}
    assert named and named <= known
