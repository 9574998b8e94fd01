"""What counts as the expected answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granite_scu.evaluation.answer_score import is_as_expected, is_json, wilson

ASKED = "Do you know the founder of Tarn Ferries?"
EXPECTED = "The founder of Tarn Ferries is Ilse Varga."


@pytest.mark.parametrize(
    ("answer", "expected", "question", "right"),
    [
        (EXPECTED, EXPECTED, ASKED, True),
        ("founder of tarn ferries is ILSE VARGA", EXPECTED, ASKED, True),
        ("Yes. The founder of Tarn Ferries is Ilse Varga, of course.", EXPECTED, ASKED, True),
        ("It is Ilse Varga.", EXPECTED, ASKED, True),
        ("The founder of Tarn Ferries is Ilse Vargas.", EXPECTED, ASKED, False),
        ("The founder of Tarn Ferries is Bram Oyelaran.", EXPECTED, ASKED, False),
        ("", EXPECTED, ASKED, False),
        ("It is 5kg.", "5 kg", "How heavy is it?", True),
        ("It is .5 percent.", "5 percent", "How much is it?", False),
        ("It is \u22125.", "-5", "How cold is it?", True),
        ("It is 5.", "\u22125", "How cold is it?", False),
        ("The answer is A.", "A", "A) a lamp B) a mast?", True),
        ("B, and not A.", "A", "A) a lamp B) a mast?", False),
        ("A lamp.", "A", "Which of the two?", False),
        # Words alone would find these very much alike.
        ("The number of sailors of Tarn Ferries is 213.", "The number of sailors of Tarn Ferries is 212.",
         "What is the number of sailors of Tarn Ferries?", False),
        ("2 + 2 = -4", "4", "What is 2 + 2?", False),
        ("At 520", "At 5.20", "When?", False),
        ("1000 crowns", "1,000 crowns", "How much?", True),
        # The question names both.
        ("It is open.", "It is closed.", "Is it open or closed?", False),
        ("No.", "Yes.", "Is it open?", False),
        # Of ten words that count one may be another, but no number.
        ("one two three four five six seven eight nine 10", "one two three four five six seven eight ten 10", "",
         True),
        ("one two three four five six seven eight nine 11", "one two three four five six seven eight nine 10", "",
         False),
        # Numbers with their units and names are what was asked for; of the words around them half may be others.
        ("Ignace Volker is in charge.", "Ignace Volker is the director of it.", "Who runs it?", True),
        ("Bram Volker is in charge.", "Ignace Volker is the director of it.", "Who runs it?", False),
        ("The opening year was 1923.", "It opened in 1923.", "When?", True),
        ("Tours are to be booked 10 weeks ahead.", "Tours must be booked 10 days ahead.", "When?", False),
        ("Dogs may enter in Berlin.", "Dogs may not enter in Berlin.", "What of dogs?", False),
        ("It is open, and has a shop.", "It is closed, and has a cafe.", "How is it?", False),
        ("It shows a wolf.", "Tarn's sign has an otter.", "What is on the sign of Tarn?", False),
        ("It has an otter.", "Tarn's sign has an otter.", "What is on the sign of Tarn?", True),
        ('{"name": "Ilse", "age": 7}', '{"name":"Ilse","age":7}', "As JSON, please", True),
        ("<think>Maybe Rome. No.</think>Paris", "<think>A capital.</think>Paris", "", True),
        ("\u0b9a\u0bc7\u0bb2\u0bae\u0bcd \u0ba4\u0bbe\u0ba9\u0bcd \u0ba8\u0b95\u0bb0\u0bae\u0bcd",
         "\u0b9a\u0bc6\u0ba9\u0bcd\u0ba9\u0bc8", "", False),
        ("\u6771\u4eac\u3067\u3059", "\u6771\u4eac", "", True),
        # Characters count as words, and so does who stands beside whom.
        ("二十", "十二", "", False),
        ("一百二十", "二百一十", "", False),
        ("答案是二百一十。", "二百一十", "", True),
        ("東京から大阪", "大阪から東京", "", False),
        ("东京", "首都是东京。", "首都是哪里?", True),
        ("3年", "保修期为3年", "保修多久\uff1f", True),
        # Other languages deny too.
        ("不可以。", "可以。", "可以吗\uff1f", False),
        ("不能退货", "能退货", "能不能退货\uff1f", False),
        ("能退货。", "能退货", "能不能退货\uff1f", True),
        ("可以\uff0c不用预约。", "可以", "", True),
        ("不能退货\uff0c三十天内", "三十天内能退货", "", False),
        ("犬は入れません。", "犬は入れます。", "", False),
        ("ไม่ได้", "ได้", "", False),
        ("Hunde sind nicht erlaubt.", "Hunde sind erlaubt.", "", False),
        ("[ ]", "[]", "", True),
        ('{"a": 1}', "{}", "", False),
        ("Il negozio non apre il lunedì.", "Il negozio apre il lunedì.", "", False),
        ("المتجر لا يفتح يوم الاثنين", "المتجر يفتح يوم الاثنين", "", False),
        ("دكان ٣", "دكان 3", "", True),
        # Yes is not no, whatever else is denied.
        ("Yes, there is no fee.", "No.", "Is there a fee?", False),
        ("No, only from 9 to 5.", "Yes, from 9 to 5.", "Is it open?", False),
        ("It costs $12.", "€12", "What does it cost?", False),
        ("It costs €12.00.", "€12", "What does it cost?", True),
        ("A) a lamp B) a mast", "B", "Which, A) a lamp or B) a mast?", False),
        ("Option B is right.", "B", "Which, A) a lamp or B) a mast?", True),
        # One of the two denies it.
        ("Refunds are not possible within 14 days of purchase.", "Refunds are possible within 14 days of purchase.",
         "How are refunds handled?", False),
        ("Dogs aren't allowed in the garden.", "Dogs are allowed in the garden.", "May dogs enter?", False),
        ("No, dogs are not allowed.", "Dogs are not allowed.", "May dogs enter?", True),
        ("The capital is not Lyon but Paris.", "The capital is Paris.", "What is the capital?", True),
        ("It is Paris and not Lyon.", "Paris", "What is the capital?", True),
        ("No more than 5 bar.", "Up to 5 bar.", "What does it hold?", True),
        ("Station No 7", "Station 7", "Where?", True),
        ("All but Monday.", "It does not open on Monday.", "On which day does it not open?", True),
        ("It takes 47 minutes, and you need no ticket.", "47 minutes.", "How long does it take?", True),
        ('{"urgent": 1}', '{"urgent": true}', "As JSON, please", False),
        ('{"price": 7.0}', '{"price": 7}', "As JSON, please", True),
        ("<think>Maybe Paris, since", "Paris", "", False),
        (" \U0001f44d", "\U0001f44d", "", True),
        ("yes", "\U0001f44d", "", False),
    ],
)  # fmt: skip
def test_an_answer_is_judged_by_what_it_says(answer, expected, question, right):
    assert is_as_expected(answer, expected, question) is right


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
    found = [is_as_expected(answer, expected, question) for answer in (expected, right, wrong)]
    assert found == [True, True, False]


TEXTS = st.text(st.sampled_from("ab 1.,'-theis\u6771\n"), max_size=30)


@given(TEXTS, TEXTS)
def test_what_was_expected_is_as_expected(expected, question):
    assert is_as_expected(expected, expected, question)


@given(st.integers(1, 500), st.integers(0, 500))
def test_the_interval_holds_the_share_and_lies_within_0_and_1(n, right):
    right = min(n, right)
    low, high = wilson(right, n)
    assert 0 <= low <= right / n + 1e-9 and right / n - 1e-9 <= high <= 1
    mirrored = wilson(n - right, n)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-9)


def test_where_json_is_expected_another_value_or_key_is_wrong():
    """The question has all of the values."""
    asked, expected = "Please send 47 door mats to Oslo.", '{"item": "door mats", "count": 47, "city": "Oslo"}'
    same, other = '{"count": 47,\n "item": "door mats", "city": "Oslo"}', expected.replace("Oslo", "Riga")
    answers = (expected, same, other, "item count city", '{"item": "glass jars", "count": 1, "city": "Riga"}')
    assert [is_as_expected(answer, expected, asked) for answer in answers] == [True, True, False, False, False]
    assert [is_json(text) for text in (expected, "[]", asked, "47")] == [True, True, False, False]
