"""What counts as the expected answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.evaluation.answer_score import is_json, score_answer, token_f1, totals, wilson, words_of

ASKED = "Do you know the founder of Tarn Ferries?"
EXPECTED = "The founder of Tarn Ferries is Ilse Varga."


@pytest.mark.parametrize(
    ("answer", "expected", "question", "exact", "contains", "right"),
    [
        (EXPECTED, EXPECTED, ASKED, True, True, True),
        ("founder of tarn ferries is ILSE VARGA", EXPECTED, ASKED, True, True, True),
        ("Yes. The founder of Tarn Ferries is Ilse Varga, of course.", EXPECTED, ASKED, False, True, True),
        ("It is Ilse Varga.", EXPECTED, ASKED, False, False, True),
        ("The founder of Tarn Ferries is Ilse Vargas.", EXPECTED, ASKED, False, False, False),
        ("The founder of Tarn Ferries is Bram Oyelaran.", EXPECTED, ASKED, False, False, False),
        ("", EXPECTED, ASKED, False, False, False),
        # Words alone would find these very much alike.
        ("The number of sailors of Tarn Ferries is 213.", "The number of sailors of Tarn Ferries is 212.",
         "What is the number of sailors of Tarn Ferries?", False, False, False),
        ("2 + 2 = -4", "4", "What is 2 + 2?", False, False, False),
        ("At 520", "At 5.20", "When?", False, False, False),
        ("1000 crowns", "1,000 crowns", "How much?", True, True, True),
        # The question names both.
        ("It is open.", "It is closed.", "Is it open or closed?", False, False, False),
        ("No.", "Yes.", "Is it open?", False, False, False),
        # Of ten words that count one may be another, but no number.
        ("one two three four five six seven eight nine 10", "one two three four five six seven eight ten 10", "",
         False, False, True),
        ("one two three four five six seven eight nine 11", "one two three four five six seven eight nine 10", "",
         False, False, False),
        # Numbers with their units and names are what was asked for; of the words around them half may be others.
        ("Ignace Volker is in charge.", "Ignace Volker is the director of it.", "Who runs it?", False, False, True),
        ("Bram Volker is in charge.", "Ignace Volker is the director of it.", "Who runs it?", False, False, False),
        ("The opening year was 1923.", "It opened in 1923.", "When?", False, False, True),
        ("Tours are to be booked 10 weeks ahead.", "Tours must be booked 10 days ahead.", "When?", False, False, False),
        ("Dogs may enter in Berlin.", "Dogs may not enter in Berlin.", "What of dogs?", False, False, False),
        ("It is open, and has a shop.", "It is closed, and has a cafe.", "How is it?", False, False, False),
        ("It shows a wolf.", "Tarn's sign has an otter.", "What is on the sign of Tarn?", False, False, False),
        ("It has an otter.", "Tarn's sign has an otter.", "What is on the sign of Tarn?", False, False, True),
        ('{"name": "Ilse", "age": 7}', '{"name":"Ilse","age":7}', "As JSON, please", True, True, True),
        ("<think>Maybe Rome. No.</think>Paris", "<think>A capital.</think>Paris", "", True, True, True),
        ("\u0b9a\u0bc7\u0bb2\u0bae\u0bcd \u0ba4\u0bbe\u0ba9\u0bcd \u0ba8\u0b95\u0bb0\u0bae\u0bcd",
         "\u0b9a\u0bc6\u0ba9\u0bcd\u0ba9\u0bc8", "", False, False, False),
        ("\u6771\u4eac\u3067\u3059", "\u6771\u4eac", "", False, True, True),
        (" \U0001f44d", "\U0001f44d", "", True, True, True),
        ("yes", "\U0001f44d", "", False, False, False),
    ],
)  # fmt: skip
def test_an_answer_is_judged_by_what_it_says(answer, expected, question, exact, contains, right):
    found = score_answer(answer, expected, question)
    assert (found.exact, found.contains, found.right) == (exact, contains, right)


def test_f1_is_squads():
    """Without articles they have 6 and 7 words, of which founder, of and is are common: 2 * 3 / 13."""
    found = score_answer("The founder of Corran Lines is Bram.", EXPECTED)
    assert found.token_f1 == pytest.approx(2 * 3 / 13)
    assert score_answer("tarn tarn", "tarn").token_f1 == pytest.approx(2 / 3)


LETTER = "Ida Moe left the mill in May 2021. She is a welder at the harbour of Bergen."


@pytest.mark.parametrize(
    ("question", "expected", "right", "wrong"),
    [
        # A span of the text that the question is about: its words count, for they are the answer.
        (f"Where does she work? Text: {LETTER}", "the harbour of Bergen", "At the harbour of Bergen.", "the mill"),
        (f"Text: {LETTER}\nWhat is her trade?", "welder", "She is a welder.", "She is at the harbour of Bergen."),
        (f"Give name and date as YEAR-MONTH.\n{LETTER}", "Ida Moe, 2021-05", "Ida Moe: 2021-05", "2021-05"),
        (f"Extract the city: {LETTER}", "City: Bergen", "Bergen", "City: mill"),
        # One of the alternatives, and no other.
        ("Is the lid red or blue?", "The lid is red.", "Red.", "The lid is blue."),
        ("Is the lid red or blue?", "The lid is red.", "It is red", "The lid is red or blue."),
        ("Say positive, negative or neutral: I loved the lamp.", "It is positive.", "Positive", "negative"),
        ("billing/shipping/returns: where is my parcel?", "shipping", "Shipping.", "billing/shipping/returns"),
        # Yes and no, numbers, facts: what the answer adds to the question.
        ("Is the shop open on Sundays?", "No, it is closed on Sundays.", "No, closed.", "Yes, open on Sundays."),
        ("How many lids has the box, 3 or 4?", "The box has 4 lids.", "4", "The box has 3 lids."),
        ("Hi, I own a lamp. How long is the warranty?", "The warranty of the lamp is 5 years.", "5 years", "2 years"),
        ("Who founded Osterby Lamps?", "Osterby Lamps was founded by Maren Tolk.", "Maren Tolk", "Osterby Lamps"),
    ],
)
def test_the_words_that_count_are_those_that_answer(question, expected, right, wrong):
    found = [score_answer(answer, expected, question).right for answer in (expected, right, wrong)]
    assert found == [True, True, False]


TEXTS = st.text(st.sampled_from("ab 1.,'-theis\u6771\n"), max_size=30)


@given(TEXTS, TEXTS, TEXTS)
def test_scores_imply_one_another(answer, expected, question):
    score = score_answer(answer, expected, question)
    assert 0 <= score.token_f1 <= 1
    assert score.token_f1 == pytest.approx(1) if score.exact else True
    assert score.exact <= score.contains <= score.right
    assert token_f1(words_of(answer), words_of(expected)) == token_f1(words_of(expected), words_of(answer))
    if expected.strip():
        assert score_answer(expected, expected, question).exact


@given(st.integers(1, 500), st.integers(0, 500))
def test_the_interval_holds_the_share_and_lies_within_0_and_1(n, right):
    right = min(n, right)
    low, high = wilson(right, n)
    assert 0 <= low <= right / n + 1e-9 and right / n - 1e-9 <= high <= 1
    mirrored = wilson(n - right, n)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-9)


def test_totals_count_answers_and_average_f1():
    scores = [score_answer(EXPECTED, EXPECTED, ASKED), score_answer("Nobody knows.", EXPECTED, ASKED)]
    assert totals(scores) == {"exact": 1, "contains": 1, "right": 1, "token_f1": 0.5}


def test_where_json_is_expected_another_value_or_key_is_wrong():
    """The question has all of the values."""
    asked, expected = "Please send 47 door mats to Oslo.", '{"item": "door mats", "count": 47, "city": "Oslo"}'
    same, other = '{"count": 47,\n "item": "door mats", "city": "Oslo"}', expected.replace("Oslo", "Riga")
    answers = (expected, same, other, "item count city", '{"item": "glass jars", "count": 1, "city": "Riga"}')
    assert [score_answer(answer, expected, asked).right for answer in answers] == [True, True, False, False, False]
    assert [is_json(text) for text in (expected, "[]", asked, "47")] == [True, True, False, False]
