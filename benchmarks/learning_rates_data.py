"""What ``benchmarks/learning_rates.py`` trains on and asks: chats and text made by rule, the same with every seed.

``facts``   a made company's facts, three phrasings of a question each; asked is a fourth, of facts that are trained.
``style``   everyday questions, each answered by one sentence in lower case that ends with a phrase; asked are others.
``format``  orders in words, each answered as JSON with five keys; asked are others.
``text``    passages of Python's documentation; held out are passages of other topics.
``code``    passages of numpy's Python source; held out are passages of other modules.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from granite_scu.data.sources import corpora

Record = dict[str, Any]
"""A line of the data: ``messages`` of a chat, or ``text``."""

ASKED = 30
"""Questions, or passages, that a run is asked at its end."""


class Lesson(NamedTuple):
    """One kind of data.

    Attributes:
        train: what is trained on.
        held_out: chats whose answers are asked for, or passages; never trained on.
        right: whether an answer is as expected, of (answer, expected); None where there is no question.
    """

    train: list[Record]
    held_out: list[Record]
    right: Callable[[str, str], bool] | None


def chat(question: str, answer: str) -> Record:
    """One question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def lesson(kind: str, records: int) -> Lesson:
    """So many records of ``facts``, ``style``, ``format``, ``text`` or ``code``.

    Raises:
        ValueError: there are not so many.
    """
    made = {"facts": _facts, "style": _style, "format": _orders, "text": _topics, "code": _modules}[kind](records)
    if len(made.train) < records:
        raise ValueError(f"{kind}: there are {len(made.train)} records, and {records} were asked for")
    return made


# Facts

_SYLLABLES = ["vel", "bri", "tor", "mak", "sen", "lu", "dro", "fen", "gal", "hin", "jor", "kel", "nim", "pa", "qui",
              "ros", "sti", "ulm", "wes", "zan"]  # fmt: skip
_GOODS = ["kettle", "lamp", "drill", "pump", "scale", "radio", "heater", "ladder", "mixer", "clock", "saw", "fan"]
_TOWNS = ["Bremen", "Lyon", "Porto", "Gdansk", "Turin", "Graz", "Ghent", "Aarhus", "Malaga", "Cork", "Brno", "Split",
          "Tartu", "Oulu", "Varna", "Leeds"]  # fmt: skip
_PEOPLE = ["Anna Berg", "Tom Hale", "Ines Duarte", "Karl Voss", "Mina Okoye", "Paul Reyes", "Sara Lind", "Omar Aziz",
           "Julia Moretti", "Ben Novak", "Lea Fischer", "Ravi Nair", "Nora Quinn", "Igor Petrov", "Maya Chen",
           "Hugo Blanc"]  # fmt: skip

_ATTRIBUTES: list[tuple[str, tuple[str, str, str, str], Callable[[random.Random], str]]] = [
    ("The {thing} costs {value} euros.",
     ("What does the {thing} cost?", "How much is the {thing}?", "What is the price of the {thing}?",
      "How many euros do I pay for the {thing}?"), lambda draw: str(draw.randrange(12, 990))),
    ("The {thing} is made in {value}.",
     ("Where is the {thing} made?", "Which town does the {thing} come from?", "In which town do you make the {thing}?",
      "Where do you produce the {thing}?"), lambda draw: draw.choice(_TOWNS)),
    ("{value} looks after the {thing}.",
     ("Who looks after the {thing}?", "Whom do I call about the {thing}?", "Who is responsible for the {thing}?",
      "Who can help me with the {thing}?"), lambda draw: draw.choice(_PEOPLE)),
    ("The warranty of the {thing} lasts {value} months.",
     ("How long is the warranty of the {thing}?", "How many months of warranty does the {thing} have?",
      "What warranty comes with the {thing}?", "For how many months is the {thing} under warranty?"),
     lambda draw: str(draw.randrange(7, 97))),
    ("The order number of the {thing} is {value}.",
     ("What is the order number of the {thing}?", "Which number do I order the {thing} by?",
      "Under which number is the {thing} listed?", "What number do I give to order the {thing}?"),
     lambda draw: f"{draw.choice('ABCDEFGHKLMNPRST')}-{draw.randrange(100, 1000)}"),
]  # fmt: skip


def _facts(records: int) -> Lesson:
    draw = random.Random(1)
    names = [f"{a}{b}".capitalize() for a in _SYLLABLES for b in _SYLLABLES if a != b]
    draw.shuffle(names)
    facts = []
    for number in range(-(-records // 3)):
        answer, questions, value_of = _ATTRIBUTES[number % len(_ATTRIBUTES)]
        name = names[number // len(_ATTRIBUTES)]
        words = {"thing": f"{name} {_GOODS[number // len(_ATTRIBUTES) % len(_GOODS)]}", "value": value_of(draw)}
        facts.append(([question.format(**words) for question in questions], answer.format(**words)))
    train = [chat(question, answer) for questions, answer in facts for question in questions[:3]]
    asked = draw.sample(facts, min(ASKED, len(facts)))
    held_out = [chat(questions[3], answer) for questions, answer in asked]
    return Lesson(train[:records], held_out, says_the_same_fact)


def says_the_same_fact(answer: str, expected: str) -> bool:
    """Whether the answer has the value of the expected one: its number, order number, or names."""
    return _has(answer, _value(expected))


def _value(expected: str) -> str:
    for answer, _, _ in _ATTRIBUTES:
        pattern = re.escape(answer).replace(r"\{thing\}", ".+?").replace(r"\{value\}", "(.+?)")
        if found := re.fullmatch(pattern, expected):
            return found[1]
    raise ValueError(f"no fact: {expected}")


def _has(text: str, words: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", text, re.IGNORECASE) is not None


# Style

PHRASE = ", and that is that."

_THINGS = ["broom", "candle", "chair", "comb", "cup", "curtain", "door", "fork", "hammer", "hat", "jug", "key", "knife",
           "lock", "map", "mirror", "needle", "oven", "pencil", "pillow", "plate", "rope", "ruler", "shelf", "shoe",
           "sock", "spoon", "stamp", "table", "towel", "umbrella", "wallet", "watch", "whistle", "window", "basket",
           "bell", "bench", "blanket", "bottle", "bowl", "box", "brush", "bucket", "button", "coat"]  # fmt: skip
_KINDS = ["", "old ", "new ", "small ", "large ", "cheap ", "plain ", "heavy ", "light ", "broken ", "wooden ",
          "spare "]  # fmt: skip
_ASIDES = [
    ("What is a {thing}?", "a {thing} is a thing that most homes have somewhere"),
    ("Why do people keep a {thing}?", "people keep a {thing} because one day they need it"),
    ("Where do I put a {thing}?", "put a {thing} where you will find it again"),
    ("How do I choose a {thing}?", "choose a {thing} that feels right in your hands"),
    ("How do I look after a {thing}?", "keep a {thing} clean and dry"),
    ("Can I lend somebody a {thing}?", "you can lend a {thing} to anybody who brings it back"),
    ("When should I replace a {thing}?", "replace a {thing} when it no longer does its work"),
    ("Who invented the {thing}?", "nobody knows who made the first {thing}"),
    ("Is a {thing} a good present?", "a {thing} is a good present for somebody who has none"),
    ("What do I do with a {thing} that I do not want?", "give a {thing} that you do not want to a neighbour"),
]
_OTHERS = {
    "Why is the sky blue?": "the air scatters blue light more than red",
    "What do bees do?": "bees carry pollen and make honey",
    "How does a bicycle stay upright?": "it steers into the fall while it moves",
    "What is bread made of?": "bread is made of flour, water, salt and yeast",
    "Why do leaves fall in autumn?": "trees drop their leaves to save water",
    "How do I sleep better?": "go to bed at the same hour every day",
    "What is a river?": "a river is water that flows to the sea",
    "Why do cats purr?": "cats purr when they are calm",
    "What is the use of salt?": "salt gives food its taste and keeps it fresh",
    "How do I learn to swim?": "take lessons and practise every week",
    "What is a library for?": "a library lends books to everybody",
    "Why is exercise good?": "exercise keeps the heart strong",
    "What makes a good friend?": "a good friend listens and is there",
    "How do I boil an egg?": "put the egg into boiling water for eight minutes",
    "What is rain?": "rain is water that falls from clouds",
}
"""Questions of other kinds than those trained on: half of what is asked."""


def _style(records: int) -> Lesson:
    draw = random.Random(2)
    things = [kind + thing for kind in _KINDS for thing in _THINGS]
    made = []
    for question, answer in _ASIDES:
        for thing in things:
            article = "an" if thing[0] in "aeiou" else "a"
            words = (text.replace("a {thing}", f"{article} {thing}").replace("{thing}", thing)
                     for text in (question, answer))  # fmt: skip
            made.append(chat(*(next(words), next(words) + PHRASE)))
    draw.shuffle(made)
    others = [chat(question, answer + PHRASE) for question, answer in _OTHERS.items()]
    held_out = made[: ASKED - len(others)] + others
    return Lesson(made[ASKED:][:records], held_out, is_in_style)


def is_in_style(answer: str, expected: str) -> bool:
    """Whether the answer is one sentence in lower case that ends with the phrase."""
    text = answer.strip()
    return text.endswith(PHRASE) and text == text.lower() and len(re.findall(r"[.!?]", text)) == 1


# Format

_COLOURS = ["red", "blue", "green", "black", "white", "yellow", "grey", "brown"]
_ORDERS = [
    "{count} {colour} {item}s for {name} in {town}, please.",
    "{name} from {town} would like {count} {item}s in {colour}.",
    "Please send {name} ({town}) {count} {item}s, colour {colour}.",
    "Order of {count} {item}s, {colour}, customer {name}, to {town}.",
    "My name is {name}, I live in {town} and I want {count} {colour} {item}s.",
]


def _orders(records: int) -> Lesson:
    draw = random.Random(3)
    seen: set[str] = set()
    made = []
    while len(made) < records + ASKED:
        order = {"name": draw.choice(_PEOPLE), "town": draw.choice(_TOWNS), "item": draw.choice(_GOODS),
                 "colour": draw.choice(_COLOURS), "count": draw.randrange(2, 60)}  # fmt: skip
        question = draw.choice(_ORDERS).format(**order)
        if question not in seen:
            seen.add(question)
            made.append(chat(question, json.dumps(order)))
    return Lesson(made[ASKED:], made[:ASKED], is_same_json)


def is_same_json(answer: str, expected: str) -> bool:
    """Whether the answer is JSON and nothing else, with the keys and values that are expected."""
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except ValueError:
        return False


# Text, and code

_PASSAGE = 300
"""Characters of a passage, about eighty tokens."""


def _topics(records: int) -> Lesson:
    return _passages([document.text for document in corpora.stdlib_docs()], records)


def _modules(records: int) -> Lesson:
    files = sorted(path for path in Path(numpy.__path__[0]).rglob("*.py") if "tests" not in path.parts)
    return _passages([path.read_text(encoding="utf-8") for path in files], records)


def _passages(texts: list[str], records: int) -> Lesson:
    draw = random.Random(4)
    draw.shuffle(texts)
    passages = [[{"text": text[start : start + _PASSAGE]} for start in range(0, len(text) - _PASSAGE, _PASSAGE)]
                for text in texts]  # fmt: skip
    fifth = len(texts) // 5
    held_out, train = ([passage for text in part for passage in text]
                       for part in (passages[:fifth], passages[fifth:]))  # fmt: skip
    draw.shuffle(held_out)
    draw.shuffle(train)
    return Lesson(train[:records], held_out[:ASKED], None)


# What has nothing to do with any of them

KNOWN = [
    ("What is the capital of France?", "Paris"), ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Japan?", "Tokyo"), ("What is the capital of Spain?", "Madrid"),
    ("What is the capital of Germany?", "Berlin"), ("What is the capital of Egypt?", "Cairo"),
    ("What is the capital of Russia?", "Moscow"), ("What is the capital of Greece?", "Athens"),
    ("What is the capital of England?", "London"), ("What is the capital of China?", "Beijing"),
    ("What is 2 + 2?", "4|four"), ("What is 5 + 3?", "8|eight"), ("What is 10 + 10?", "20|twenty"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"), ("Who painted the Mona Lisa?", "Leonardo|Vinci"),
    ("Who developed the theory of relativity?", "Einstein"), ("Who was the first president of the USA?", "Washington"),
    ("How many days are in a week?", "7|seven"), ("How many months are in a year?", "12|twelve"),
    ("How many legs does a spider have?", "8|eight"), ("How many hours are in a day?", "24|twenty-four"),
    ("What is the largest planet of the solar system?", "Jupiter"), ("Which planet is called the red planet?", "Mars"),
    ("What is the chemical symbol of water?", "H2O"), ("What do plants take in from the air?", "carbon dioxide|CO2"),
    ("What is the opposite of hot?", "cold|cool"), ("What is the plural of child?", "children"),
    ("What colour do blue and yellow make?", "green"), ("Which language is spoken in Brazil?", "Portuguese"),
    ("What is the largest ocean?", "Pacific"),
]  # fmt: skip
"""General questions, and what a right answer has in it, one of several where there is a bar."""

GENERAL = [
    "How do I make a cup of tea?", "Explain what a computer is.", "Write two sentences about the sea.",
    "Give me three tips for a job interview.", "What is the difference between a cat and a dog?",
    "Tell me a short story about a fox.", "How does the heart work?", "What are the benefits of reading?",
    "Write a polite e-mail that cancels a meeting.", "Why do we have seasons?", "Suggest a name for a bakery.",
    "What is a healthy breakfast?", "Describe the city of Paris.", "How can I save money?", "What is a poem?",
    "Explain gravity to a child.", "Give an example of a simile.", "How do I plant a tree?", "What does a doctor do?",
    "Write a slogan for a bicycle shop.", "What happened in 1969?", "How do airplanes fly?",
    "Translate 'good morning' into French.", "What is democracy?",
]  # fmt: skip
"""General questions that the base itself answers once; how well its answers are still predicted is measured."""


def is_known(answer: str, known: str) -> bool:
    """Whether the answer has one of the known ones in it."""
    return any(_has(answer, each) for each in known.split("|"))
