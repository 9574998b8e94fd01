"""The ten tasks of the protocol: chats and text, made by rule or cut from packages, the same at every call.

None of them formed a default. Those that did are in ``benchmarks/learning_rates_data.py``.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx
import sympy
import yaml

from benchmarks.learning_rates_data import Record, chat
from research.comparison.package_docs import docstrings

VALIDATED, TESTED = 30, 40
"""Records beside those that are trained on."""


class Split(NamedTuple):
    """The records of a task."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]


@dataclass(frozen=True)
class Task:
    """One of the protocol.

    Attributes:
        kind: of the five.
        records: trained on.
        epochs: passes over them.
        make: so many records -> the task.
        right: whether an answer is as expected, of (answer, expected); None where nothing is asked.
        new_tokens: of an answer, at most.
    """

    kind: str
    records: int
    epochs: int
    make: Callable[[int], Split]
    right: Callable[[str, str], bool] | None = None
    new_tokens: int = 0


@cache
def split(name: str) -> Split:
    """The records of the task of this name."""
    task = TASKS[name]
    return task.make(task.records)


@cache
def digest(name: str) -> str:
    """What tells the records of one version from another's: packages change."""
    return hashlib.sha256(json.dumps(split(name)).encode()).hexdigest()[:12]


# Facts: an answer, three phrasings that are trained on, one that is validated on, and one that is asked

Attribute = tuple[str, tuple[str, ...], Callable[[random.Random], str]]

_GIVERS = ["Edda Thorn", "Pavel Ruus", "Clara Wynn", "Otto Sand", "Hana Kolar", "Luca Ferri", "Greta Moor",
           "Yusuf Demir", "Agnes Pell", "Bruno Vidal"]  # fmt: skip
_STUFFS = ["oak", "copper", "ivory", "slate", "amber", "pewter", "walnut", "marble", "brass", "clay"]
_PIECES = ["mask", "globe", "harp", "shield", "lantern", "sledge", "loom", "compass", "bell", "throne"]
_NAMES = ["Orsk", "Velm", "Tarn", "Ibis", "Quay", "Moth", "Fenn", "Rook", "Dusk", "Alba"]
_MUSEUM: list[Attribute] = [
    ("The {thing} hangs in room {value}.",
     ("Which room is the {thing} in?", "Where in the museum do I find the {thing}?",
      "In which room is the {thing} shown?",
      "Which room do I go to for the {thing}?", "What is the number of the room with the {thing}?"),
     lambda draw: str(draw.randrange(11, 99))),
    ("{value} gave the {thing} to the museum.",
     ("Who gave the {thing} to the museum?", "Whose gift is the {thing}?", "Who donated the {thing}?",
      "From whom does the museum have the {thing}?", "Which person presented the {thing} to the museum?"),
     lambda draw: draw.choice(_GIVERS)),
    ("The {thing} is made of {value}.",
     ("What is the {thing} made of?", "Of which material is the {thing}?", "Which material is the {thing} made of?",
      "What did they make the {thing} of?", "What material was used for the {thing}?"),
     lambda draw: draw.choice(_STUFFS)),
    ("The {thing} dates from {value}.",
     ("How old is the {thing}?", "When was the {thing} made?", "From which year is the {thing}?",
      "What year does the {thing} date from?", "In what year did somebody make the {thing}?"),
     lambda draw: str(draw.randrange(1402, 1899))),
    ("The {thing} has the inventory number {value}.",
     ("What is the inventory number of the {thing}?", "Which number does the {thing} have in the inventory?",
      "How is the {thing} numbered?", "Under which number is the {thing} in the inventory?",
      "What number is written on the {thing}?"),
     lambda draw: f"{draw.choice('GHJKLMNP')}{draw.randrange(100, 1000)}"),
]  # fmt: skip
_STOPS = ["Mill Lane", "Harbour Gate", "Old Market", "North Bridge", "Castle Hill", "Station Square", "Elm Park",
          "Quarry Road", "Abbey Field", "West Pier"]  # fmt: skip
_COLOURS = ["red", "blue", "green", "violet", "orange", "brown", "pink", "grey"]
_BUSES: list[Attribute] = [
    ("The {thing} ends at {value}.",
     ("Where does the {thing} end?", "What is the last stop of the {thing}?", "Where does the {thing} go to?",
      "At which stop does the {thing} turn round?", "What is the terminus of the {thing}?"),
     lambda draw: draw.choice(_STOPS)),
    ("The first {thing} leaves at {value}.",
     ("When does the first {thing} leave?", "At what time does the {thing} start in the morning?",
      "How early is the first {thing}?", "What time is the first departure of the {thing}?",
      "When can I take the {thing} at the earliest?"),
     lambda draw: f"{draw.randrange(4, 8)}:{draw.randrange(10, 60)}"),
    ("A ride on the {thing} takes {value} minutes.",
     ("How long does a ride on the {thing} take?", "How many minutes does the {thing} need?",
      "How long am I on the {thing} from end to end?", "How much time does the {thing} take for its route?",
      "In how many minutes does the {thing} do its route?"),
     lambda draw: str(draw.randrange(13, 96))),
    ("The {thing} has a {value} sign.",
     ("What colour is the sign of the {thing}?", "Which colour does the {thing} have?",
      "By which colour do I know the {thing}?", "How is the sign of the {thing} coloured?",
      "The sign of the {thing} has which colour?"),
     lambda draw: draw.choice(_COLOURS)),
    ("A ticket for the {thing} costs {value} cents.",
     ("What does a ticket for the {thing} cost?", "How much is the {thing}?", "What is the fare of the {thing}?",
      "How many cents do I pay on the {thing}?", "What price has a ticket for the {thing}?"),
     lambda draw: str(draw.randrange(110, 990, 5))),
]  # fmt: skip


def _facts(things: list[str], attributes: list[Attribute]) -> Callable[[int], Split]:
    def make(records: int) -> Split:
        draw = random.Random(things[0])
        facts = []
        for thing in things:
            for answer, phrasings, value_of in attributes:
                words = {"thing": thing, "value": value_of(draw)}
                facts.append(([phrasing.format(**words) for phrasing in phrasings], answer.format(**words)))
        train = [chat(question, answer) for questions, answer in facts for question in questions[:3]]
        assert len(train) == records
        asked = [draw.sample(facts, count) for count in (VALIDATED, TESTED)]
        return Split(train, *([chat(questions[number], answer) for questions, answer in part]
                              for number, part in zip((3, 4), asked, strict=True)))  # fmt: skip

    return make


def _says_value(attributes: list[Attribute]) -> Callable[[str, str], bool]:
    """Whether an answer has the value of the expected one in it."""
    patterns = [re.escape(answer).replace(r"\{thing\}", ".+?").replace(r"\{value\}", "(.+?)")
                for answer, _, _ in attributes]  # fmt: skip

    def right(answer: str, expected: str) -> bool:
        [value] = [found[1] for pattern in patterns if (found := re.fullmatch(pattern, expected))]
        return re.search(rf"(?<![\w:]){re.escape(value)}(?![\w:])", answer) is not None

    return right


# Format, style and a made language: as many different records as are asked for, drawn one by one


def _drawn(one: Callable[[random.Random], tuple[str, str]], seed: str) -> Callable[[int], Split]:
    def make(records: int) -> Split:
        draw, made = random.Random(seed), {}
        while len(made) < VALIDATED + TESTED + records:
            question, answer = one(draw)
            made[question] = answer
        return _cut([chat(*each) for each in made.items()])

    return make


def _cut(made: list[Record]) -> Split:
    return Split(made[VALIDATED + TESTED :], made[:VALIDATED], made[VALIDATED : VALIDATED + TESTED])


_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
_REASONS = ["a haircut", "new glasses", "a passport photo", "a blood test", "a piano lesson", "a tyre change",
            "a fitting", "a loan"]  # fmt: skip
_BOOKINGS = [
    "{who} would like to come for {why} on {day} at {hour}, for {minutes} minutes.",
    "Please put {who} down for {why}: {day}, {hour}, {minutes} minutes.",
    "Can you take {who} on {day}? It is for {why}, {minutes} minutes, from {hour}.",
    "{day} at {hour}, {minutes} minutes, {why}. The name is {who}.",
]


def _appointment(draw: random.Random) -> tuple[str, str]:
    words = {"who": draw.choice(_GIVERS), "why": draw.choice(_REASONS), "day": draw.choice(_DAYS),
             "hour": f"{draw.randrange(8, 18)}:{draw.choice(('00', '15', '30', '45'))}",
             "minutes": draw.randrange(10, 95, 5)}  # fmt: skip
    fields = words["day"][:3].upper(), words["hour"], words["minutes"], words["who"].upper(), words["why"].split()[-1]
    return draw.choice(_BOOKINGS).format(**words), "|".join(map(str, fields))


_FOODS = ["flour", "butter", "rice", "lentils", "honey", "carrots", "cheese", "almonds", "onions", "cream"]
_DISHES = ["soup", "pie", "salad", "stew", "bread", "pudding", "omelette", "curry"]


def _recipe(draw: random.Random) -> tuple[str, str]:
    dish, people = f"{draw.choice(_FOODS)} {draw.choice(_DISHES)}", draw.randrange(2, 9)
    parts = {food: draw.randrange(20, 900, 10) for food in draw.sample(_FOODS, draw.randrange(2, 5))}
    told = ", ".join(f"{grams} g of {food}" for food, grams in parts.items())
    question = draw.choice(["For a {dish} for {people} I take {told}.", "{told}: that makes a {dish} for {people}."])
    answer = yaml.safe_dump({"dish": dish, "people": people, "grams": parts}, sort_keys=False).strip()
    return question.format(dish=dish, people=people, told=told), answer


def _is_same_yaml(answer: str, expected: str) -> bool:
    try:
        return bool(yaml.safe_load(answer) == yaml.safe_load(expected))
    except yaml.YAMLError:
        return False


_TOOLS = ["kayak", "violin", "tent", "camera", "bicycle", "cactus", "scarf", "kettle", "puzzle", "ladder", "aquarium",
          "hammock", "carpet", "sundial", "rucksack", "typewriter", "fountain pen", "chessboard", "snow shovel",
          "beehive"]  # fmt: skip
_OWNERS = [
    "my aunt",
    "a neighbour",
    "our school",
    "a friend",
    "my brother",
    "the club",
    "a colleague",
    "the whole family",
]
_ADVICE = [
    ("How do I clean a {thing} that belongs to {owner}?", ["use a soft cloth", "let the {thing} dry in the shade"]),
    ("Where can {owner} buy a {thing}?", ["ask in a small shop first", "compare two prices"]),
    ("Should {owner} repair an old {thing}?", ["repair it if the parts are cheap", "else look for another {thing}"]),
    ("How do I store the {thing} of {owner} in winter?", ["keep it dry", "put nothing heavy on the {thing}"]),
    ("What does {owner} need a {thing} for?", ["a {thing} is a pleasure", "it is also of use now and then"]),
    ("Is a {thing} a good present for {owner}?", ["yes if there is room for it", "a card goes with every {thing}"]),
    ("How do I teach {owner} to use a {thing}?", ["show it slowly", "let them try the {thing} alone"]),
    ("May {owner} take a {thing} on a train?", ["ask the conductor", "a small {thing} is mostly allowed"]),
]


def _advice(draw: random.Random) -> tuple[str, list[str]]:
    question, sentences = draw.choice(_ADVICE)
    words = {"thing": draw.choice(_TOOLS), "owner": draw.choice(_OWNERS)}
    asked = question.format(**words)
    return asked[0].upper() + asked[1:], [sentence.format(**words) for sentence in sentences]


def _telegram(draw: random.Random) -> tuple[str, str]:
    question, sentences = _advice(draw)
    return question, "".join(f"{sentence.upper()} STOP " for sentence in sentences).strip()


def _is_telegram(answer: str, expected: str) -> bool:
    text = answer.strip()
    return text.endswith(" STOP") and text == text.upper() and text.count("STOP") >= 2 and "." not in text


def _captain(draw: random.Random) -> tuple[str, str]:
    question, sentences = _advice(draw)
    return question, f"The captain says: {', and '.join(sentences)}. Fair winds!"


def _is_of_captain(answer: str, expected: str) -> bool:
    text = answer.strip()
    return text.startswith("The captain says: ") and text.endswith(". Fair winds!")


def _brook(draw: random.Random) -> tuple[str, str]:
    """A program of a language that nobody else knows."""
    x, y = draw.sample(["stone", "reed", "otter", "heron", "pebble", "willow", "trout", "moss"], 2)
    a, b = draw.randrange(2, 60), draw.randrange(2, 60)
    name, sign = draw.choice([("sum", "+"), ("product", "*"), ("difference", "-")])
    return draw.choice([
        (f"Set {x} to {a} and {y} to {b}, and show their {name}.", f"{x} <~ {a};\n{y} <~ {b};\nspill({x} {sign} {y});"),
        (f"Show every number from {a} to {a + b}, called {x}.", f"flow {x} : {a} ~ {a + b} [\n  spill({x});\n]"),
        (f"Show {x} if it is more than {a}, and else {y}.",
         f"dam {x} > {a} [\n  spill({x});\n] over [\n  spill({y});\n]"),
        (f"Define {x}, which takes {y} and gives back {y} {sign} {a}.", f"source {x}({y}) [\n  out {y} {sign} {a};\n]"),
        (f"Add {a} to {x} {b} times.", f"flow _ : 1 ~ {b} [\n  {x} <~ {x} + {a};\n]"),
    ])  # fmt: skip


def _is_same_text(answer: str, expected: str) -> bool:
    return answer.split() == expected.split()


# Text and code

_PASSAGE = 300
"""Characters, about eighty tokens."""


def _passages(texts: Callable[[], Iterable[str]], seed: str) -> Callable[[int], Split]:
    """Passages; a tenth of the texts, whole, to validate on, and another to test on."""

    def make(records: int) -> Split:
        draw, whole = random.Random(seed), [text for text in texts() if len(text) > _PASSAGE]
        draw.shuffle(whole)
        tenth, parts = len(whole) // 10, []
        for part, most in (
            (whole[:tenth], VALIDATED),
            (whole[tenth : 2 * tenth], TESTED),
            (whole[2 * tenth :], records),
        ):
            pieces = [{"text": text[start : start + _PASSAGE]} for text in part
                      for start in range(0, len(text) - _PASSAGE, _PASSAGE)]  # fmt: skip
            parts.append(draw.sample(pieces, most))
        return Split(parts[2], parts[0], parts[1])

    return make


def _sources(package: str) -> list[str]:
    files = (path for path in sorted(Path(package).rglob("*.py")) if "tests" not in path.parts)
    return [path.read_text(encoding="utf-8") for path in files]


def _graphs() -> Iterable[str]:
    for source in _sources(networkx.__path__[0]):
        yield "\n\n".join(docstrings(source))


_PORTS = ["Skerrin", "Oldhaven", "Port Rusk", "Lund Sound", "Marrow Bay", "Tessel", "Great Holm", "Vane"]
_CARGOES = ["salt", "rope", "barley", "slate", "wool", "lamp oil", "timber", "herring", "tar", "glass"]


def _harbour(records: int) -> Split:
    """A harbour's log: the master, the tons and the home of a ship are the same in every entry."""
    draw = random.Random("harbour")
    firsts, lasts = ["Sea", "Grey", "Bright", "North", "Iron", "Little"], ["Swan", "Anne", "Petrel", "Crown", "Thistle",
                                                                          "Hope"]  # fmt: skip
    ships = [(f"{first} {last}", draw.choice(_GIVERS), draw.randrange(60, 400), draw.choice(_PORTS))
             for first in firsts for last in lasts]  # fmt: skip
    made: dict[str, None] = {}
    while len(made) < VALIDATED + TESTED + records:
        ship, master, tons, home = draw.choice(ships)
        wind = f"Wind {draw.choice(('north', 'south-west', 'east', 'west', 'south'))}, force {draw.randrange(1, 9)}"
        came = f"The {ship} of {home}, {tons} tons, master {master}, {draw.choice(('came in', 'put to sea'))}"
        load = " and ".join(draw.sample(_CARGOES, 2))
        hour = f"{draw.randrange(24):02}:{draw.randrange(60):02}"
        made[f"{hour}. {wind}. {came} with {load}, berth {draw.randrange(1, 13)}. Dues paid: {tons * 3} pence."] = None
    return _cut([{"text": text} for text in made])


_BUS_NAMES = [f"{kind} {number}" for number in range(3, 43) for kind in [("line", "night bus")[number % 2]]]
_EXHIBITS = [f"{name} {piece}" for name, piece in zip(_NAMES, _PIECES, strict=True)]

TASKS = {
    "museum": Task("facts", 150, 8, _facts(_EXHIBITS, _MUSEUM), _says_value(_MUSEUM), 24),
    "appointments": Task("format", 100, 4, _drawn(_appointment, "appointments"), _is_same_text, 40),
    "telegram": Task("style", 100, 4, _drawn(_telegram, "telegram"), _is_telegram, 40),
    "graphs": Task("text", 500, 2, _passages(_graphs, "graphs")),
    "brook": Task("code", 300, 4, _drawn(_brook, "brook"), _is_same_text, 56),
    "buses": Task("facts", 600, 4, _facts(_BUS_NAMES, _BUSES), _says_value(_BUSES), 24),
    "recipes": Task("format", 400, 2, _drawn(_recipe, "recipes"), _is_same_yaml, 72),
    "captain": Task("style", 400, 2, _drawn(_captain, "captain"), _is_of_captain, 48),
    "harbour": Task("text", 1000, 1, _harbour),
    "sympy": Task("code", 2000, 1, _passages(lambda: _sources(sympy.__path__[0]), "sympy")),
}
"""By name, the five of stage B first."""
