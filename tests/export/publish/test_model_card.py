"""The card says what was measured, what was not, and nothing about the machine."""

import re

import pytest
import yaml
from markdown_it import MarkdownIt

from granite_scu.config.settings import TINY_MODEL
from granite_scu.export.publish.model_card import model_card

HUB_ID = "ibm-granite/granite-4.0-h-1b"


def facts(**changes) -> dict:
    summary = {
        "base_test_bpt": 7.1234567,
        "adapter_test_bpt": 6.5,
        "best_val_bpt": 6.61,
        "best_val_step": 900,
        "test_tokens": 24576,
        "s_ema": 0.019876,
        "lambda": 12.34567,
        "steps": 1000,
        "tokens": 32768000,
        "wall_time_s": 3661.2,
    }
    return {
        "base_model": HUB_ID,
        "data": "stdlib-docs",
        "controller": "pi",
        "target_s": 0.02,
        "summary": summary,
        "hyperparameters": {"rank": 16, "learning_rate": 1e-4, "targets": ["in_proj", "out_proj"]},
        "versions": {"torch": "2.13.0", "peft": "0.21.2"},
    } | changes


def card(**changes) -> str:
    return model_card(facts(**changes))


def front_matter(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_family_is_that_of_the_base_models_type_or_of_its_name_where_that_is_not_known():
    def tags(**more) -> list[str]:
        return front_matter(card(**more))["tags"]

    assert "granite" in tags(base_model="me/mine", model_type="granitemoehybrid")
    assert "granite" not in tags(base_model="me/granite-like", model_type="llama")
    assert "granite" not in tags(base_model="me/mine")


def test_of_chats_the_card_asks_a_question():
    assert "apply_chat_template" in card(chats=True) and "A function is" not in card(chats=True)
    assert "apply_chat_template" not in card(chats=False)


def test_of_chats_the_card_stops_where_an_answer_ends():
    assert 'convert_tokens_to_ids("<|im_end|>")' in card(chats=True, answer_end="<|im_end|>")
    assert "eos_token_id" not in card(chats=False, answer_end="<|im_end|>")


def test_the_front_matter_is_what_the_hub_reads():
    front = front_matter(card())
    (index,) = front.pop("model-index")
    expected = {"library_name": "peft", "base_model": HUB_ID, "license": "apache-2.0"}
    assert front == expected | {"pipeline_tag": "text-generation", "tags": ["lora", "granite", "scu"]}
    dataset = {"name": "stdlib-docs, held-out documents", "type": "stdlib-docs", "split": "test"}
    metrics = [{"type": "bits_per_token", "value": 6.5, "name": "bits per token"}]
    assert index["results"] == [{"task": {"type": "text-generation"}, "dataset": dataset, "metrics": metrics}]


def test_scores_are_of_the_text_that_was_tested_on_and_of_paths_only_the_last_names_are_told():
    of = {"data": ["chats.jsonl", "/home/ada/general.jsonl"], "tested": ["/home/ada/checked.jsonl"]}
    text = card(**of, summary=facts()["summary"] | {"test_is_validation": True})
    (index,) = front_matter(text)["model-index"]
    dataset = {"name": "checked.jsonl, validation documents", "type": "checked.jsonl", "split": "validation"}
    assert index["results"][0]["dataset"] == dataset
    assert "/home" not in text and "chats.jsonl, general.jsonl" in text
    assert "| base model, validation documents, by which the adapter was chosen |" in text


@pytest.mark.parametrize(
    "row",
    [
        "| base model, held-out test documents | 7.1235 bits per token on 24,576 tokens |",
        "| with the adapter, same documents | 6.5000 bits per token on 24,576 tokens |",
        "| with the adapter, on the validation sample | 6.6100 bits per token |",
        "| the adapter's step, of 1,000: the best validated | 900 |",
        "| S at the end, smoothed | 1.99 % |",
        "| setpoint S* | 2 % |",
        "| lambda at the end | 12.35 |",
        "| optimizer steps | 1,000 |",
        "| training tokens | 32,768,000 |",
        "| wall time | 3,661 s |",
        "| targets | in_proj, out_proj |",
        "| learning_rate | 0.0001 |",
        "| torch | 2.13.0 |",
        "![S against its setpoint, and lambda, over the optimizer steps](control.png)",
        "stdlib-docs",
    ],
)
def test_every_fact_is_on_the_card(row):
    assert row in card().splitlines()


def test_an_adapter_to_start_from_has_its_bits_beside_the_others():
    row = "| with the adapter that training started from, same documents | 6.8000 bits per token on 24,576 tokens |"
    assert row in card(summary=facts()["summary"] | {"start_test_bpt": 6.8})
    assert "started from" not in card()


def test_answers_stand_beside_those_of_the_base():
    answers = {"answers": {"n": 9, "right": 7, "base": {"right": 1}, "interval": [0.45, 0.94]}}
    general = {"elsewhere": {"n": 30, "right_before": 18, "right_after": 10}}
    text = card(summary=facts()["summary"] | answers | general)
    assert "answered as expected, of 9 | 7 (95 % interval 45 % to 94 %); by the base model 1 |" in text
    assert "| general questions answered right, of 30 | 10; by the base model 18 |" in text
    assert "questions answered" not in card()


def test_drift_stands_on_the_card_where_it_was_measured():
    drift = {"budget": 0.02, "share": 0.018, "tokens": 512, "within": True}
    held = {"drift": drift, "s": 0.031, "s_ema": None, "elsewhere": {"drift": {"share": 0.23}}}
    text = card(summary=facts()["summary"] | held)
    assert "| drift on general text, of the base's bits | 1.8 %; at most 2 % asked for |" in text
    assert "the model has drifted by 1.8" in text
    assert "which held drift on general text, at most 2 %" in text and "![Drift against its budget, and lambda" in text
    assert "answers to general questions | 23 %" in text and "| S at the end | 3.1 %" in text
    assert "Drift = KL(" in text
    assert "asked for" not in card(summary=facts()["summary"] | {"drift": drift | {"budget": None, "within": None}})
    assert "drift" not in card()


def test_what_was_not_measured_is_said():
    text = card(summary={"steps": 7, "adapter_test_bpt": None}, data=None, versions={})
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))
    assert rows["optimizer steps"] == "7"
    unmeasured = ("base model, held-out test documents", "with the adapter, same documents", "lambda at the end")
    assert [rows[name] for name in unmeasured] == ["not measured"] * 3
    assert "## Data\n\nnot measured" in text and "## Versions\n\nNot measured." in text
    assert "None" not in text


def test_plain_lora_has_neither_s_nor_lambda_among_its_results():
    text = card(summary=facts()["summary"] | {"lambda": 0.0, "s_ema": 1.0})
    assert "S at the end" not in text and "lambda at the end" not in text


def test_a_run_without_a_setpoint_claims_none():
    text = card(controller="none", target_s=None)
    assert "controller `none`, no setpoint" in text
    assert "S*" not in text and "its setpoint" not in text


@pytest.mark.parametrize("base", ["{folder}/private/granite-local", "/home/me/models/granite-local", "~/granite-local"])
def test_a_local_base_is_named_without_its_place(tmp_path, base):
    (tmp_path / "private" / "granite-local").mkdir(parents=True)
    base = base.format(folder=tmp_path)
    text = card(base_model=base, data=f"{tmp_path}/private/letters.txt", hyperparameters={"out": "/home/me/run"})
    assert "`granite-local`, a local model" in text and "letters.txt" in text
    assert not any(place in text for place in (str(tmp_path), "private", "/home", "~"))


def structure(text: str) -> list[tuple]:
    """What Markdown makes of a card: its blocks, and its links, pictures and HTML."""
    parsed = MarkdownIt("commonmark", {"linkify": False}).enable("table").parse(text.partition("\n---\n")[2])
    inline = [child for token in parsed for child in token.children or []]
    active = [(t.type, *t.attrs.values()) for t in inline if t.type in ("link_open", "image", "html_inline")]
    return [(token.type, token.tag) for token in parsed] + active


@pytest.mark.parametrize(
    "name",
    [
        "# Heading ![x](http://evil.test/x.png) [a](http://evil.test) <img src=x> `code` | cell",
        "line\n\n# Heading\n\n![x](http://evil.test/x.png)",
        'end`` " ``` ![x](http://evil.test/x.png)\n---\n',
        "1. one",
        "> quoted &lt;b&gt;",
        "\\[a](http://evil.test)",
    ],
)
def test_a_strangers_names_are_text(name):
    """Of a corpus, a model, a law, a setting and a version; the card has the same parts as an ordinary one."""
    plain, settings = "a name", {"rank": 16}
    evaluation = {
        **{"data": name, "documents": 7, "tokens": 1234, "max_length": 128, "stride": 64, "units": name},
        **{"difference": -0.5, "low": None, "high": None, "confidence": 0.95, "verdict": name},
        **{each: {"bits_per_token": 5.0, "bits_per_byte": 2.0, "perplexity": 32.0} for each in ("base", "adapter")},
    }
    ordinary = {key: plain if value == name else value for key, value in evaluation.items()}
    spoilt = {"base_model": name, "data": name, "controller": name, "hyperparameters": {name: [name]}}
    text = card(**spoilt, versions={name: name}, evaluation=evaluation)
    other = card(
        **dict.fromkeys(("base_model", "data", "controller"), plain), hyperparameters=settings, versions=settings,
        evaluation=ordinary,
    )  # fmt: skip
    assert structure(text) == structure(other)
    metadata = front_matter(text)
    assert metadata.keys() == front_matter(other).keys()
    compile(re.search(r"```python\n(.*?)\n```\n", text, re.DOTALL)[1], "README.md", "exec")


def test_a_cell_does_not_break_its_table():
    assert r"| pattern | a\|b |" in card(hyperparameters={"pattern": "a|b"})


@pytest.mark.parametrize(
    ("base", "on_the_hub", "licence", "source"),
    [
        (HUB_ID, HUB_ID, "apache-2.0", f'from_pretrained("{HUB_ID}")\n'),
        ("somebody/model", "somebody/model", None, 'from_pretrained("somebody/model")\n'),
        ("/models/base", None, None, 'from_pretrained("base")  # a local model: give the path of its folder\n'),
        (
            TINY_MODEL,
            None,
            "apache-2.0",
            'from_pretrained(str(files("granite_scu.model") / "assets" / "tiny-granite-h"))\n',
        ),
    ],
)
def test_the_base_is_linked_loaded_and_licensed_as_it_is_known(base, on_the_hub, licence, source):
    text = card(base_model=base)
    assert (front_matter(text).get("base_model"), front_matter(text).get("license")) == (on_the_hub, licence)
    assert ("The adapter: not chosen." in text) == (licence is None)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    compile(code, "README.md", "exec")
    assert source in code


def test_the_results_begin_with_what_was_learned_and_lost():
    general = {"n": 30, "asked": 30, "became_wrong": 5, "damaged": True, "lost": ["Who *was* it?"]}
    answers = {"n": 30, "right": 24, "interval": [0.63, 0.9], "base": {"right": 0}, "better": True}
    summary = {**facts()["summary"], "answers": answers, "elsewhere": general | {"right_before": 9, "right_after": 4}}
    validated = [(step, 1.0) for step in (100, 500, 1000)]
    text = card(summary=summary, lower_rate=5e-4, validations=validated)
    told = text.partition("## Results\n\n")[2].partition("|")[0]
    words = "Learned your data: 24 of 30 answers as expected (base 0). Elsewhere 5 of 30 general answers became wrong ("
    assert told.startswith(words + "Who \\*was\\* it?): "), told
    for remedy in ("--max-drift", "mix in general chats", "fewer epochs", "lower the rate to 5e-4", "Do not use"):
        assert remedy in told
