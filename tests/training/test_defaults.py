"""What is chosen where nobody gives it, for each size of data on each kind of machine."""

import json
import math

import pytest

from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.config.settings import TINY_MODEL
from granite_scu.model.loading import load_model_config, load_tokenizer
from granite_scu.training.defaults import Cut, Text, Usual, block_size, compiles, settle
from granite_scu.training.fitting import build_data, fit_to_text

GUIDES, CPU, T4, A100 = Usual(8, 4, 1024), Usual(2, 8, 1024), Usual(3, 11, 768), Usual(8, 8, 2048)
WIDTHS = {"SmolLM2": 576, "Granite 4.0 H 1B": 1536}

CHATS = {n: Text(True, n, 55 * n, 68) for n in (24, 80, 800, 4000)}
"""Of 30, 100, 1,000 and 5,000 short conversations what is trained on."""

MEGABYTES = {n: Text(False, 40 * n, 200_000 * n, 0) for n in (1, 100, 10_000)}


def chosen(text: Text, usual: Usual, given: dict | None = None, width: int = 576, processes: int = 1) -> dict:
    """The settings chosen, over the usual ones and what was given, and how they cut the text."""
    given = given or {}
    text = text._replace(asked=given.get("data.num_epochs"))
    block = block_size(text, usual, processes)
    size = given.get("data.block_size", block.value if block else usual.block)
    blocks = max(1, math.ceil(text.documents / (size // 55)) if text.chats else text.tokens // size)
    held_out = max(1, blocks // 8)
    cut = Cut(size, blocks, held_out, held_out * text.documents // blocks)
    found = {choice.key: choice.value for choice in settle(text, cut, usual, given, width, processes)}
    return {"data.block_size": size, "blocks": blocks, **given, **found}


def steps_of(found: dict, processes: int = 1) -> tuple[int, int]:
    """Steps, and blocks in a step."""
    blocks = found["data.batch_size"] * found["trainer.accumulate_grad_batches"] * processes
    return found["trainer.max_steps"], blocks


@pytest.mark.parametrize("usual", [GUIDES, CPU, T4, A100], ids=["guides", "cpu", "t4", "a100"])
@pytest.mark.parametrize("text", [*CHATS.values(), *MEGABYTES.values()], ids=str)
@pytest.mark.parametrize("processes", [1, 2])
def test_each_amount_of_data_gets_a_run_that_learns_on_each_machine(text, usual, processes):
    found = chosen(text, usual, processes=processes)
    (steps, blocks), rate = steps_of(found, processes), found["optimizer.learning_rate"]
    # Of a step that is one block in each process there is no smaller one.
    assert 100 // processes <= steps <= (5000 if text.chats else 1000)
    assert blocks * found["data.block_size"] <= usual.tokens * processes
    assert found["data.batch_size"] * found["data.block_size"] <= usual.batch * usual.block  # the memory that it takes
    assert steps * blocks <= 11 * found["blocks"]  # ten epochs, and a step that completes the last
    assert not text.chats or found["data.block_size"] >= text.longest - 1
    assert 0 <= found["optimizer.warmup_steps"] <= min(50, steps / 10)
    assert 4 < steps / found["run.eval_steps"] <= 11  # and the last step has one in any case
    assert found["control.every"] == 10
    assert 1e-4 <= rate <= 2e-3


@pytest.mark.parametrize(
    ("text", "steps", "epochs"),
    [
        (CHATS[24], 120, 10),
        (CHATS[80], 100, 10),
        (CHATS[800], 900, 9),
        (CHATS[4000], 4000, 8),
        (MEGABYTES[1], 112, 4),
        (MEGABYTES[100], 1000, 1),
    ],
    ids=str,
)
def test_little_data_is_read_often_and_in_small_steps(text, steps, epochs):
    found = chosen(text, GUIDES)
    length, blocks = steps_of(found)
    assert length == pytest.approx(steps, rel=0.1)
    assert length * blocks / found["blocks"] == pytest.approx(epochs, rel=0.1)


@pytest.mark.parametrize("usual", [GUIDES, CPU, T4, A100])
def test_data_that_fill_them_get_the_guides_values(usual):
    found = chosen(MEGABYTES[10_000], usual)
    fixed = {"data.batch_size": usual.batch, "trainer.accumulate_grad_batches": usual.accumulation}
    fixed |= {"data.block_size": usual.block, "trainer.max_steps": 1000, "optimizer.learning_rate": 1e-4}
    fixed |= {"optimizer.warmup_steps": 50, "run.eval_steps": 200, "control.every": 10}
    assert found.items() >= fixed.items()
    assert settle(None, Cut(usual.block, 9, 9, 9), usual, {}, 576)[0].value == 1000  # a stream, which nobody counts


def test_the_rate_falls_with_the_models_width():
    small, granite = (chosen(CHATS[80], GUIDES, width=width)["optimizer.learning_rate"] for width in WIDTHS.values())
    assert small / granite == pytest.approx((1536 / 576) ** 0.78, rel=0.05)  # both are told in two figures


@pytest.mark.parametrize(
    ("steps", "block", "controlled", "holds_drift", "every"),
    [
        (48, 64, False, False, 10),
        (48, 64, True, False, 1),
        (48, 64, True, True, 3),  # 512 tokens a step: four would leave 12 ticks
        (100, 64, True, True, 4),  # 2,048 tokens
        (400, 64, True, True, 10),
        (999, 8, True, True, 10),
    ],
)
def test_ticks_that_read_general_text_are_further_apart(steps, block, controlled, holds_drift, every):
    given = {"trainer.max_steps": steps, "data.batch_size": 8, "trainer.accumulate_grad_batches": 1}
    found = settle(CHATS[80], Cut(block, 80, 9, 9), GUIDES, given, 576, 1, controlled, holds_drift)
    assert {choice.key: choice.value for choice in found}["control.every"] == every


@pytest.mark.parametrize(
    "given",
    [
        {"trainer.max_steps": 7},
        {"data.num_epochs": 2},
        {"data.batch_size": 4},
        {"data.batch_size": 8, "trainer.accumulate_grad_batches": 4},
        {"trainer.accumulate_grad_batches": 16},
        {"optimizer.learning_rate": 1e-5, "optimizer.warmup_steps": 33},
        {"control.every": 3, "run.eval_steps": 2, "trainer.limit_val_batches": 1},
    ],
    ids=str,
)
def test_what_is_given_is_kept(given):
    found = chosen(CHATS[80], GUIDES, given)
    assert found.items() >= given.items()
    assert found["data.batch_size"] * found["trainer.accumulate_grad_batches"] >= 1
    if not given.keys() & {"trainer.max_steps", "data.num_epochs"}:
        in_a_step = found["data.batch_size"] * found["trainer.accumulate_grad_batches"]
        assert found["trainer.max_steps"] == math.ceil(10 * found["blocks"] / in_a_step)
    if "data.num_epochs" in given:
        assert "trainer.max_steps" not in found


@pytest.mark.parametrize(
    ("seconds", "micro_batches", "compiled"),
    [(2, 100, False), (0, 100, False), (1000, 100, True), (30, 5000, True), (0, 5000, True)],
)
def test_layers_are_compiled_where_the_run_saves_more_than_that_takes(seconds, micro_batches, compiled):
    choice = compiles(seconds, micro_batches, layers=40)
    assert choice.value is compiled and f"--torch-compile {'on' if compiled else 'off'}: " in choice.why


def test_few_epochs_say_why_a_step_is_small():
    text = CHATS[80]._replace(asked=2)
    whys = [
        choice.why for choice in settle(text, Cut(64, 80, 9, 9, "conversation"), GUIDES, {"data.num_epochs": 2}, 576)
    ]
    assert any("1 conversation in a step" in why and "20 steps" in why for why in whys)
    among_texts = settle(text, Cut(64, 80, 9, 9, "document"), GUIDES, {"data.num_epochs": 2}, 576)
    assert not any("conversation" in choice.why for choice in among_texts)


@pytest.mark.parametrize(("longest", "said"), [(7034, True), (500, False)])
def test_one_long_conversation_that_fills_the_steps_is_said_with_what_leaves_it_out(longest, said):
    text = Text(chats=True, documents=200, tokens=16000, longest=longest)
    whys = [choice.why for choice in settle(text, Cut(7040, 3, 1, 9), GUIDES, {}, 576)]
    assert any("--on-long drop --block-size 1024" in why and "7,034" in why for why in whys) == said


def test_a_small_step_that_is_given_makes_no_much_text_of_a_little(tmp_path):
    chats = tmp_path / "chats.jsonl"
    lines = [{"prompt": f"Which ship is number {n}?", "completion": f"The ship of the year {n}."} for n in range(900)]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rates = []
    for step in ({}, {"data.batch_size": 1, "trainer.accumulate_grad_batches": 1}):
        fitted, _ = fitted_to([str(chats)], {"data.block_size": 64} | step)
        rates.append(fitted.optimizer.learning_rate)
    assert rates[0] == rates[1]


def test_a_chat_among_texts_makes_no_small_set_of_chats_of_them(tmp_path):
    texts, chat = tmp_path / "texts.jsonl", tmp_path / "chat.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} " + "a line of text\n" * 200}) + "\n" for n in range(60)))
    chat.write_text(json.dumps({"prompt": "Which ship?", "completion": "The ship of the year."}) + "\n")
    alone, both = (fitted_to(files, {})[0] for files in ([str(texts)], [str(texts), str(chat)]))
    assert both.trainer.max_steps == pytest.approx(alone.trainer.max_steps, rel=0.05)


def fitted_to(files: list[str], settings: dict, **of_model) -> tuple[Request, list[str]]:
    config = load_model_config(TINY_MODEL)
    config.update(of_model)
    request = Request.from_dotted({"base.name": TINY_MODEL, "data.path": files} | settings)
    return fit_to_text(request, build_data(request), load_tokenizer(TINY_MODEL), config, processes=1)


@pytest.fixture
def answers(tmp_path):
    """Writes chats with answers of so many words each; returns the file's name."""

    def write(name: str, *words: int) -> str:
        turns = ({"prompt": f"What is {name} {n}?", "completion": "It is so. " * k} for n, k in enumerate(words))
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in turns))
        return str(path)

    return write


def test_a_source_that_is_read_several_times_counts_as_often(answers):
    one, other = answers("one", *[4] * 60), answers("other", *[4] * 60)
    weighted, lines = fitted_to([one, other], {"data.weights": [5, 5]})
    assert any("540 conversations, about 8 in a step" in line for line in lines)  # five times 108
    assert weighted.trainer.max_steps == math.ceil(9 * 540 / 8)


def test_blocks_are_not_made_for_what_is_dropped(answers):
    short = [4] * 60
    without, with_long = answers("short", *short), answers("long", *short, 3000)
    found = {file: fitted_to([file], {"data.on_long": "drop"})[0].data.block_size for file in (without, with_long)}
    assert found[with_long] == found[without] < 1024


def test_blocks_hold_a_chat_among_longer_texts_and_no_more_of_one_than_is_learned(answers, tmp_path):
    texts, unlearned = tmp_path / "texts.jsonl", tmp_path / "unlearned.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} " + "a line of text\n" * 30}) + "\n" for n in range(60)))
    asked, long = ({"role": "user", "content": "Is it so? " * n} for n in (1, 400))
    ending = [asked, {"role": "assistant", "content": "It is so."}, long]
    unlearned.write_text("".join(json.dumps({"messages": each}) + "\n" for each in ([long], ending)))
    short, whole = answers("short", *[4] * 40), answers("whole", *[4] * 20, 50)
    assert fitted_to([short, str(unlearned)], {})[0].data.block_size == 64
    assert fitted_to([str(texts)], {})[0].data.block_size == 128
    fitted, lines = fitted_to([whole, str(texts)], {})
    assert fitted.data.block_size == 256 and "blocks of 256 tokens: the longest conversation has 2" in "".join(lines)


def test_blocks_are_no_longer_than_the_model_has_positions(answers):
    of_model = {"position_embedding_type": "rope", "max_position_embeddings": 96}
    fitted, lines = fitted_to([answers("few", *[4] * 60, 14)], {}, **of_model)
    assert fitted.data.block_size == 96
    assert "blocks of 96 tokens: the model was made for no more" in lines


@pytest.mark.parametrize(
    ("words", "block", "share"),
    [(200, 16, None), (85, None, None), (88, 8, None), (20, 16, 0), (5, None, 0)],
)
def test_a_short_text_gets_blocks_that_leave_some_to_validate_on(tmp_path, words, block, share):
    text, settings = tmp_path / "text.txt", {} if share is None else {"data.held_out_share": share}
    text.write_text("word " * words)
    if block:
        assert fitted_to([str(text)], settings)[0].data.block_size == block
    else:
        with pytest.raises(UserError, match=r"too few .*; add [0-9]+ tokens? of text") as refused:
            fitted_to([str(text)], settings)
        assert "--block-size 8" in str(refused.value)
