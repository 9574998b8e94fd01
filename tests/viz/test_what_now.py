"""What a run folder asks to be done next, and with which command."""

import json

import pytest
from folders import METRICS, holding, record, rising, settings, write_run

from granite_scu.evaluation.answer_score import wilson
from granite_scu.storage.run_folder import LOG_FILES
from granite_scu.viz.run_folder import read_run
from granite_scu.viz.what_now import place, verdict, what_now, where, which_adapter


def advice(folder, history=None, validations=(), metrics=METRICS, **changes):
    """By title, what a run of these asks for."""
    changes = {"run": {"output_dir": f"runs/{folder.name}"}} | changes
    write_run(folder, history or rising(), {"controller": "pi"}, settings(**changes), validations, metrics)
    return {each.title: each for each in what_now(read_run(folder))}


def test_a_better_adapter_is_to_be_used_and_made_sure_of(tmp_path):
    found = advice(tmp_path / "demo")
    use = found["Try the adapter"]
    assert use.text == "It lies in runs/demo."
    assert use.command == 'granite-scu generate runs/demo --prompt "..."'
    assert found["Make sure of the difference"].command == "granite-scu eval runs/demo"


def test_a_run_that_was_scored_by_document_is_not_to_be_scored_again(tmp_path):
    advice(tmp_path / "demo")
    (tmp_path / "demo" / "eval_bpt.json").write_text(json.dumps({"units": "documents", "pairs": []}))
    titles = [each.title for each in what_now(read_run(tmp_path / "demo"))]
    assert "Use the adapter" in titles and "Make sure of the difference" not in titles


@pytest.mark.parametrize(("high", "title"), [(-0.1, "Use the adapter"), (0.02, "Read what both write")])
def test_an_interval_with_0_in_it_is_heeded(tmp_path, high, title):
    advice(tmp_path / "demo")
    found = {"units": "documents", "pairs": [{"a": "base", "b": "demo", "low": -0.7, "high": high}]}
    (tmp_path / "demo" / "eval_bpt.json").write_text(json.dumps(found))
    first = what_now(read_run(tmp_path / "demo"))[0]
    assert first.title == title and first.command.startswith("granite-scu generate runs/demo")


def test_of_two_adapters_it_says_which(tmp_path):
    use = advice(tmp_path / "demo", metrics=METRICS | {"best_val_step": 300, "best_val_bpt": 5.85})["Try the adapter"]
    assert "and is that of step 300, which validated best (5.850 bits per token); that of the last step (" in use.text


VALIDATED = {"best_val_step": 80, "best_val_bpt": 5.125, "final_val_bpt": 5.25, "steps": 100}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (100, "that of the last step, which validated best"),
        (
            80,
            "that of step 80, which validated best (5.125 bits per token); that of the last step (5.250) is in final/",
        ),
    ],
)
def test_it_says_which_steps_adapter_was_left(step, words):
    assert which_adapter(VALIDATED | {"best_val_step": step}) == words


@pytest.mark.parametrize(("within", "words"), [(True, "best within the budget"), (False, "nearest to the budget")])
def test_of_a_run_that_held_drift_it_says_whether_the_adapter_is_within_the_budget(within, words):
    assert words in which_adapter(VALIDATED | {"drift": {"budget": 0.02, "within": within}})


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (100, "the last step, scaled by 0.75 to keep to the budget of drift; unscaled (5.250 bits per token) it is in"),
        (80, "step 80, scaled by 0.75 to keep to the budget of drift (5.125 bits per token); that of the last step"),
    ],
)
def test_it_says_whether_the_last_adapter_was_scaled_or_an_earlier_one(step, words):
    scaled = {"drift": {"budget": 0.02, "within": True, "scale": 0.75}, "best_val_step": step}
    assert words in which_adapter(VALIDATED | scaled)


def test_an_adapter_that_is_no_better_is_not_to_be_used(tmp_path):
    found = advice(tmp_path / "demo", metrics=METRICS | {"adapter_test_bpt": 6.6})
    assert "Try the adapter" not in found and "Use the base model." in found["Do not use this adapter"].text
    assert found["Try a lower learning rate"].command == (
        "granite-scu train --config runs/demo/config.yaml --output-dir runs/demo-2 --learning-rate 3e-4"
    )


@pytest.mark.parametrize(
    ("validations", "title", "flags"),
    [
        ([(100, 6.1), (200, 6.0), (300, 5.95)], "Train longer", "--max-steps 800"),
        ([(100, 5.7), (200, 6.0), (300, 5.95)], "Train for fewer steps", "--max-steps 100"),
        ([(26, 0.002), (200, 0.001), (400, 0.001)], "Train for fewer steps", "--max-steps 26"),
        ([], "Validate more often", "--eval-steps 80"),
    ],
)
def test_where_the_validation_was_best_says_what_to_try(tmp_path, validations, title, flags):
    found = advice(tmp_path / "demo", validations=validations)
    assert found[title].command.endswith(f"--output-dir runs/demo-2 {flags}")


def test_a_run_whose_length_is_in_epochs_is_made_longer_in_epochs(tmp_path):
    found = advice(tmp_path / "demo", validations=[(100, 6.1), (300, 5.95)], data={"num_epochs": 1.5})
    assert found["Train longer"].command.endswith("--num-epochs 3")


@pytest.mark.parametrize("late", [5.901, 5.899])
def test_a_validation_that_stood_still_at_the_end_asks_for_nothing(tmp_path, late):
    found = advice(tmp_path / "demo", validations=[(100, 6.1), (300, late)])
    assert list(found) == ["Try the adapter", "Make sure of the difference"]


def validated_on(tokens: int) -> dict:
    """Settings of a run that validates on all of so many tokens, in three processes."""
    split = {"documents": 9, "blocks": 9, "supervised_tokens": tokens}
    processes = {"machine": {"devices": 3, "nodes": 1}}
    limit = {"data": {"batch_size": 1}, "trainer": {"limit_val_batches": 3}}
    return processes | limit | {"data_summary": {"validation": split}}


@pytest.mark.parametrize(
    ("tokens", "values", "title"),
    [
        # It fell to its end, and the last one is a hair above the one before it.
        (400, [(14, 1.7292), (28, 0.9438), (42, 0.5127), (55, 0.2090), (56, 0.2104)], "Train longer"),
        # The same on so little text that 0.3 bits a token are chance: 7.7 nats / 30 tokens = 0.37 bits.
        (30, [(14, 1.7292), (28, 0.9438), (42, 0.5127), (55, 0.2090), (56, 0.2104)], None),
        # It rose, by less and by more than is chance: 7.7 nats / 400 tokens = 0.028 bits.
        (400, [(14, 1.7292), (28, 0.2090), (42, 0.2200), (56, 0.2300)], None),
        (400, [(14, 1.7292), (28, 0.2090), (42, 0.2400), (56, 0.2600)], "Train for fewer steps"),
    ],
)
def test_two_validations_are_told_apart_where_chance_is_not_their_difference(tmp_path, tokens, values, title):
    metrics = METRICS | {"steps": 56, "final_val_bpt": values[-1][1]}
    found = advice(tmp_path / "demo", validations=values, metrics=metrics, **validated_on(tokens))
    assert {"Train longer", "Train for fewer steps"} & set(found) == ({title} if title else set())


def answered(right: int, base: int = 0, n: int = 30) -> dict:
    """Figures of answers, with Wilson's interval."""
    low, high = wilson(right, n)
    found = {"n": n, "asked": n, "right": right, "interval": [low, high], "base": {"right": base},
             "better": right > base + 4, "worse": base > right + 4}  # fmt: skip
    return {"answers": found}


def general(wrong: int, right: int = 0, damaged: bool = False, more: float = 0.0) -> dict:
    """Figures of general answers."""
    lost = ["What is the capital of France?"] * wrong
    bits = {"bits_before": 1.0, "bits_after": 1.0 + more, "tokens": 200}
    counts = {"n": 30, "asked": 30, "right_before": 18, "became_wrong": wrong, "became_right": right}
    return {"elsewhere": counts | bits | {"lost": lost, "damaged": damaged}}


def moved(share: float, budget: float | None, **more) -> dict:
    """Figures of drift."""
    within = None if budget is None else share <= 1.1 * budget
    return {"drift": {"budget": budget, "share": share, "tokens": 512, "within": within, "lambda": 0.84, **more}}


@pytest.mark.parametrize(
    ("figures", "state", "words"),
    [
        (answered(24) | general(0), "good", "24 of 30 answers as expected (base 0). Elsewhere none of"),
        (answered(24) | general(5, damaged=True), "damaged", "became wrong (What is the capital of France? What is"),
        (answered(24) | general(5, damaged=True), "damaged", ": give --max-drift 5%, mix in general chats ("),
        (answered(24) | general(5, damaged=True), "damaged", "or lower the rate to 5e-4. Do not use this adapter for"),
        (answered(24) | {"elsewhere": general(0, damaged=True, more=1.5)["elsewhere"] | {"n": 0}}, "damaged",
         "answered in the time; known answers cost 1.5 bits per token more"),
        (answered(24) | general(5, damaged=True) | moved(0.018, 0.02), "damaged", "lower --max-drift to 1%"),
        (answered(24) | moved(0.018, 0.02) | {"elsewhere": {"drift": {"share": 0.23, "tokens": 300}}}, "good",
         "by 1.8 % (at most 2 %), on 512 tokens of general text that the loop did not see, and by 23 % on 300 tokens"),
        (answered(24) | moved(0.0215, 0.02), "good", "by 2.15 % (budget 2 %, exceeded by less than a tenth), on"),
        (answered(24) | moved(0.01, 0.02, bound="lower"), "good", "bound nothing: λ rested at 0.84"),
        (answered(24) | moved(0.02, 0.02, scale=0.42), "good", "scaled by 0.42: a third of the learning rate"),
        (answered(24) | moved(0.03, 0.02), "good", "by 3 %, more than the 2 % asked for"),
        (answered(24) | moved(0.14, None), "good", "to general questions): --max-drift 5% would hold it back."),
        (answered(24) | moved(0.14, None) | general(5, damaged=True), "damaged", "answers to general questions)."),
        (answered(24) | moved(0.01, None), "good", "by 1 % (512 tokens of the base model's answers to general qu"),
        (answered(24) | general(0, damaged=True, more=0.71), "damaged", "known answers cost 0.71 bits per token more"),
        (answered(24) | general(2), "good", "What is the capital of France?); so few can be chance."),
        (answered(24) | general(5, 4), "good", "capital of France? …), 4 right; the difference can be"),
        (answered(24) | general(1, 3), "good", "wrong (What is the capital of France?), 3 right."),
        (answered(16), "good", "Learned part of your data: 16 of 30"),
        (answered(5), "unclear", "Learned little of your data: 5 of 30 answers as expected (base 0)."),
        (answered(17, base=15), "unclear", "Not shown to have learned your data: 17 of 30 answers"),
        (answered(0), "unclear", "0 of 30 answers as expected (base 0), although held-out text costs 70"),
        (answered(2, base=20), "useless", "Not shown to have learned your data: 2 of 30 answers as expected"),
        (answered(2, base=20) | general(5, damaged=True), "useless", "France? …). Do not use this adapter."),
        (answered(0) | {"adapter_test_bpt": 4.0}, "useless", "(base 0), and held-out text costs 100 % more bits"),
        ({}, "good", "Learned your data: held-out text costs 0.600 bits per token (base 2.000)."),
        ({"adapter_test_bpt": 2.1}, "useless", "Learned nothing that holds for other documents"),
        # 7.7 nats / 200 tokens = 0.055 bits
        ({"adapter_test_bpt": 2.04}, "unclear", "Not shown to have learned your data"),
        ({"adapter_test_bpt": 1.96}, "unclear", "so little text shows differences from 0.055 bits per token on."),
        ({"base_test_bpt": None, "adapter_test_bpt": None}, "unclear", "not known: nothing was held out"),
    ],
)  # fmt: skip
def test_the_verdict(figures, state, words):
    bits = {"base_test_bpt": 2.0, "adapter_test_bpt": 0.6, "test_tokens": 200}
    found = verdict(bits | figures, lower=5e-4)
    assert found.state == state and words in str(found).replace("\N{NO-BREAK SPACE}", " ")


def test_where_much_was_lost_and_validation_stood_still_early_fewer_epochs_are_named():
    metrics = {"base_test_bpt": 2.0, "adapter_test_bpt": 0.6, "test_tokens": 200, "steps": 300}
    found = verdict(metrics | general(5, damaged=True), validations=[(26, 0.001), (150, 0.001), (300, 0.001)])
    assert found.remedy.endswith(", or train for fewer epochs (validation fell no further after step 26 of 300)")


def test_a_run_that_validated_nothing_is_not_said_to_have_stood_still(tmp_path):
    metrics = METRICS | answered(3) | {"final_val_bpt": None, "best_val_bpt": None, "best_val_step": None}
    found = advice(tmp_path / "demo", metrics=metrics, optimizer={"learning_rate": 1e-4})
    assert "alidation" not in found["Try a higher learning rate"].text and "Train longer" not in found


def test_a_run_with_nothing_held_out_is_not_said_to_have_learned_little(tmp_path):
    metrics = METRICS | dict.fromkeys(("base_test_bpt", "adapter_test_bpt", "final_val_bpt"))
    found = advice(tmp_path / "demo", metrics=metrics, optimizer={"learning_rate": 1e-4})
    assert "is not known" in found["Read what both write"].text and "Try a higher learning rate" not in found


def test_an_interval_of_twelve_documents_says_what_twelve_can_show():
    bits = {"base_test_bpt": 2.0, "adapter_test_bpt": 2.3, "test_tokens": 200}
    found = verdict(bits, interval=(-0.30, 0.91))
    assert found.state == "unclear" and "shows differences from 0.6 bits per token on" in found.learned


def test_a_run_that_lost_what_the_base_knew_is_neither_better_nor_to_be_longer(tmp_path):
    values = [(100, 6.1), (200, 6.0), (300, 5.95)]
    metrics = METRICS | answered(24) | general(5, damaged=True)
    found = advice(tmp_path / "demo", validations=values, metrics=metrics)
    assert list(found) == ["Do not use this adapter for anything but your data", "Or mix in general chats"]
    held, mixed = found.values()
    assert held.command.endswith("--output-dir runs/demo-2 --max-drift 5%")
    assert "--output-dir runs/demo-3 --data-dir" in mixed.command and "general.jsonl --data-weights" in mixed.command
    assert "better" not in held.text + mixed.text + str(verdict(metrics, 1e-3))
    secret = {"data": {"path": "/home/me/my texts"}}
    again = advice(tmp_path / "again", validations=values, metrics=metrics | moved(0.018, 0.02), **secret)
    assert "--data-dir 'my texts' general.jsonl" in again["Or mix in general chats"].command
    assert next(iter(again.values())).command.endswith("again-2 --max-drift 1%")


@pytest.mark.parametrize(("rule", "lower"), [(1.3e-3, None), (8e-4, "8e-4"), (1e-4, "5e-4")])
def test_a_lower_rate_is_advised_where_it_is_above_what_suits_the_width(tmp_path, rule, lower):
    metrics = METRICS | answered(24) | general(5, damaged=True)
    found = advice(tmp_path / "demo", metrics=metrics, rate_by_width=rule).get("Or lower the learning rate")
    assert (found and found.command.endswith(f"--output-dir runs/demo-4 --learning-rate {lower}")) == (lower and True)


@pytest.mark.parametrize(("last", "said"), [(5.0, True), (5.95, False)])
def test_where_a_better_adapter_was_beyond_the_budget_more_general_text_is_named(tmp_path, last, said):
    metrics = METRICS | moved(0.012, 0.02) | {"best_val_step": 100, "best_val_bpt": 5.9, "final_val_bpt": last}
    asked = settings(drift={"max_drift": 0.02, "general_tokens": 2048})
    folder = write_run(tmp_path / "demo", holding(), {"controller": "pi"}, asked, [(100, 5.9)], metrics)
    found = {each.title: each for each in what_now(read_run(folder))}
    assert ("Give the loop more general text" in found) == said
    if said:
        assert found["Give the loop more general text"].command.endswith("--general-tokens 4096")
        assert "Train longer" not in found


def test_after_chats_the_adapter_is_tried_in_a_chat(tmp_path):
    found = advice(tmp_path / "demo", metrics=METRICS | answered(24) | general(0))
    assert found["Use the adapter"].command == "granite-scu generate runs/demo --chat"


def test_a_stopped_run_has_the_signal_and_the_command_that_goes_on(tmp_path):
    advice(tmp_path / "my run", metrics=None)
    (tmp_path / "my run" / "stopped.json").write_text(json.dumps({"signal": "SIGINT", "step": 1200}))
    (only,) = what_now(read_run(tmp_path / "my run"))
    assert "stopped by SIGINT (Ctrl-C) after step 1,200" in only.text
    assert only.command == "granite-scu train --output-dir 'runs/my run' --resume-from-checkpoint last"


def test_a_run_that_was_cut_off_goes_on_from_its_last_checkpoint_if_it_has_one(tmp_path):
    first = advice(tmp_path / "demo", metrics=None)["Start the run again"]
    assert first.command == "granite-scu train --config runs/demo/config.yaml --output-dir runs/demo-2"
    (tmp_path / "demo" / "checkpoint-100").mkdir()
    (only,) = what_now(read_run(tmp_path / "demo"))
    assert only.command.endswith("--resume-from-checkpoint last")


def test_a_run_that_ended_in_an_error_has_that_and_one_that_diverged_a_lower_rate(tmp_path):
    advice(tmp_path / "demo", metrics=None)
    log = tmp_path / "demo" / LOG_FILES["cpu"]
    log.write_text("2026-01-01 00:00:00,000 ERROR step 3: nan; lower --learning-rate, or use --precision fp32\n")
    (only,) = what_now(read_run(tmp_path / "demo"))
    assert only.text == "It ended in an error: step 3: nan; lower --learning-rate, or use --precision fp32."
    assert only.command.endswith("--output-dir runs/demo-2 --learning-rate 3e-4")
    with log.open("a") as file:
        file.write("2026-01-01 00:00:01,000 INFO step 4\n")
    assert what_now(read_run(tmp_path / "demo"))[0].text.startswith("It was cut off"), "it was continued"
    with log.open("a") as file:
        file.write("2026-01-01 00:00:01,000 ERROR a worker is gone\n")
    assert "an error: a worker is gone. It had no" in what_now(read_run(tmp_path / "demo"))[0].text
    (tmp_path / "demo" / "checkpoint-100").mkdir()
    assert what_now(read_run(tmp_path / "demo"))[0].title == "Continue the run"


def test_a_setpoint_that_was_not_held_is_among_what_to_do(tmp_path):
    low = [record(10 * k, s_ema=0.01) for k in range(1, 41)]
    control = {"settling_time": None, "iae": 0.7}
    found = advice(tmp_path / "demo", low, metrics=METRICS | {"control": control})
    assert found["Let S settle"].command.endswith("--max-steps 800")


def test_a_folder_is_named_as_it_was_asked_for_unless_by_a_path_from_the_root(tmp_path):
    for number, (asked, named, ends) in enumerate(
        [
            ("out/{}", "out/{}", "started."),
            ("out/{}/", "out/{}", "started."),
            ("/home/me/{}", "{}", "with the path of the run folder in place of run-2."),
        ]
    ):
        name = f"run-{number}"
        folder = write_run(tmp_path / name, [record(10)], {}, settings(run={"output_dir": asked.format(name)}))
        run = read_run(folder)
        assert place(run) == named.format(name) and where(run).endswith(ends)
