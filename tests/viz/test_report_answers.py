"""What base model and adapter answer, and how they continue two test documents, on the page."""

import json

from granite_scu.viz.report import build_report
from granite_scu.viz.run_folder import read_run

TEXTS = {"prompt": "Once <b>", "document": " upon a time", "base": " there & then", "adapter": ""}


def page(folder, samples) -> str:
    (folder / "samples.json").write_text(json.dumps({"max_new_tokens": 40, "temperature": 0.5, "samples": samples}))
    return build_report(read_run(folder))


def test_both_continuations_stand_side_by_side_below_the_beginning(finished):
    source = page(finished, [TEXTS])
    begins = source.index("Once &lt;b&gt;")
    pair = source[source.index('class="pair"', begins) : source.index("How the document continues")]
    assert "Base model" in pair and " there &amp; then" in pair
    assert "Adapter" in pair and "(nothing)" in pair
    assert "each by at most 40 tokens, at temperature 0.5" in source
    assert " upon a time" in source and "in the same words" not in source


def test_that_both_say_the_same_is_said(finished):
    source = page(finished, [{**TEXTS, "adapter": TEXTS["base"]}, TEXTS])
    assert source.count("Both continue it in the same words.") == 1


def test_without_samples_or_with_damaged_ones_there_is_no_such_section(finished):
    assert "What the models write" not in build_report(read_run(finished))
    for damaged in ([], [{**TEXTS, "base": None}], ["text"], None):
        assert "What the models write" not in page(finished, damaged)


def answer(question: str, base: str, adapter: str, right: bool) -> dict:
    return {
        "question": question, "expected": "Ilse <Varga>", "base": base, "adapter": adapter,
        "scores": {"base": {"right": False}, "adapter": {"right": right}},
    }  # fmt: skip


def asked(folder, count: int = 12) -> str:
    """The page of a run that was asked so many questions, the last of them answered wrong."""
    given = [answer(f"Who & {k}?", "no idea", f"Ilse {k}", k < count - 1) for k in range(count)]
    (folder / "answers.json").write_text(json.dumps({"answers": given}))
    figures = {"n": count, "right": count - 1, "interval": [0.6, 0.9], "rule": "it says so", "base": {"right": 0},
               "asked": 30, "better": True}  # fmt: skip
    metrics = json.loads((folder / "scu_metrics.json").read_text()) | {"answers": figures}
    (folder / "scu_metrics.json").write_text(json.dumps(metrics))
    return build_report(read_run(folder))


def test_each_question_stands_with_what_was_expected_and_answered_right_or_wrong(finished):
    source = asked(finished)
    table = source[source.index("Answers to held-out questions") : source.index("Loss and validation")]
    assert table.count("Who &amp; ") == table.count("Ilse &lt;Varga&gt;") == table.count("no idea") == 12
    assert table.count('aria-label="right"') == 11 and table.count('aria-label="wrong"') == 13
    assert table.index("Ilse 11") < table.index("Ilse 0"), "the wrong one comes first"
    assert "11 of 12 are as expected (12 of 30 were answered in the time); the others" in table
    assert "overflow-y: auto; white-space: pre-wrap; }" in source and "max-height: none; overflow: visible" in source
    assert "60\N{NO-BREAK SPACE}% to 90" in table and "It says so." in table and "2 more" in table
    assert "What the models write" not in source and "Learned your data: 11 of 12 answers" in source


def test_of_general_questions_those_come_first_whose_answers_became_wrong(finished):
    questions = [
        {"question": f"Q{k}", "answer": "Paris", "before": "Paris.", "after": "?", "right_before": True,
         "right_after": k != 3} for k in range(5)
    ]  # fmt: skip
    questions.append({"question": "never answered", "answer": "x"})
    (finished / "elsewhere.json").write_text(json.dumps({"questions": questions}))
    source = build_report(read_run(finished))
    table = source[source.index("Answers elsewhere") : source.index("Loss and validation")]
    assert table.index("Q3") < table.index("Q0") < table.index("2 more") < table.index("Q4")
    assert "never answered" not in table


def test_damaged_answers_are_as_none(finished):
    for damaged in ({"answers": [{"question": 3}]}, {"answers": None}, {"questions": ["x"]}):
        for name in ("answers.json", "elsewhere.json"):
            (finished / name).write_text(json.dumps(damaged))
        assert "Expected</th>" not in build_report(read_run(finished))
