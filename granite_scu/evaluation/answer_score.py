"""Whether an answer says what the expected one does."""

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from statistics import NormalDist

from granite_scu.data.tokens.special_tokens import THINKING

RULE = (
    "an answer is as expected if it has every number, and nine in ten of the words, that the expected answer adds to "
    "the question; words such as the, is and of do not count, of alternatives (red or blue) it may have the expected "
    "one alone, it denies something (no, not, never) where the expected one does, and where JSON is expected it must "
    "be the same JSON. Where the expected answer adds a number or name, half of the words are enough, if all numbers "
    "with their units, all names, and words such as only are among them. Of a script without spaces each character is "
    "a word, and nine in ten of those side by side must be so in the answer"
)
"""What ``is_as_expected`` says, for people."""

SHARE, SHARE_WITH_NAMES = 0.9, 0.5
"""Of the words that an expected answer adds to the question: all of up to nine, all but one of ten to nineteen; and
half where it has all names and numbers, which are then what was asked for."""

ARTICLES = frozenset({"a", "an", "the"})
_SMALL = """am and are as at be been being but by did do does for from had has have he her his i in into is it its
me my of on or our she so that their them then there these they this those to was we were will with would you your"""
SMALL_WORDS = ARTICLES.union(_SMALL.split())
"""English words that say nothing by themselves. No and not are none of them."""
_DENIALS = """no not never none nobody nothing neither nor cannot cant couldnt didnt doesnt dont hadnt hasnt havent isnt
arent wasnt werent wont wouldnt shouldnt mustnt"""
_OTHER_DENIALS = """nicht nie niemals kein keine keinem keinen keiner keines niet geen pas jamais nunca não non не нет
لا لم لن ليس ليست नहीं değil inte ikke tidak bukan không δεν לא 不 没 沒"""
_DENYING = frozenset(f"{_DENIALS} {_OTHER_DENIALS}".split())
"""English words that deny what is said, and the commonest of other languages, as ``words_of`` has them."""
_DENYING_PARTS = ("ない", "ません", "ไม่")
"""The same, of several characters that each count as a word."""
_OR_NOT = re.compile(r"(\w)[不没沒]\1")
"""How Chinese asks for yes or no, which denies nothing."""
_TURNING = _DENYING | {"only", "except", "without"}
"""Words that turn what is said, whatever names stand beside them."""

_NUMBER = r"(?<![\w.])-?(?:\d[\d.,:]*\d|\.?\d+)"
"""With what belongs to it: -5, 3.14, .5, 1,000 and 5:20 are one word each; of 5kg it is 5."""
_MARK = r"[\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0951-\u0957\u0962\u0963"
_MARK += r"\u0981-\u0dff\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ebc\u0ec8-\u0ece"
_MARK += r"\u102b-\u103e\u17b4-\u17d3\u200c\u200d]"
"""What belongs to the letter before it, as the vowels of Indic scripts and Thai do: to ``re`` it is no part of a word.
Of the scripts from Bengali to Sinhala it is any character: they have no marks of punctuation of their own but one."""
_CHARACTER = r"[\u0e01-\u0eff\u1000-\u102a\u1780-\u17b3\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
"""Of a script without spaces, in which each character counts as a word."""
_WORD = re.compile(rf"{_NUMBER}|{_CHARACTER}{_MARK}*|(?:(?!{_CHARACTER})\w{_MARK}*)+")
_PARTS = re.compile(r":\s+|\n+")
"""What divides a question from a text that it is about."""
_CONTRASTS = r"but|and not|no more than|no later than|not more than"
_CLAUSE = re.compile(
    rf"[.,;:!?\n。、\uff0c\uff1b\uff1a\uff01\uff1f]+|\b(?:{_CONTRASTS})\b|\bno\b\.?(?= ?\d)", re.IGNORECASE
)
"""What divides the parts of a sentence that may each deny something; not in "No 7" and "no more than"."""
_OR = re.compile(r"\b\w+(?:(?:, ?or |, | ?[/|] ?| or )\w+)+"), re.compile(r"\b\w+(?:(?:,? or | ?[/|] ?)\w+)+")
"""Alternatives: with those that commas divide, and without."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POSSESSIVE = re.compile(r"(?<=\w)['\u2019]s\b")
_LEADING_POINT = re.compile(r"^(-?)\.")
_NO_CENTS = re.compile(r"^(-?\d+)\.0{1,2}$")
"""12.00, but not 1.000, which may be a thousand."""
_ALIKE = str.maketrans({"'": None, "\u2019": None, "\u2212": "-"})
"""Apostrophes, and the mathematical sign for minus."""
_CHOICE = re.compile(r"(?<!\w)[A-Z](?!\w|\s+\w)")
"""The letter of a choice: A as an article stands before a word."""
_YES, _NO = "yes ja oui si sí sim ano tak da نعم", "no nein non não ne nee nie нет لا"
_SAYS_YES = dict.fromkeys(_YES.split(), True) | dict.fromkeys(_NO.split(), False)
"""By the first word of an answer."""


def words_of(text: str) -> list[str]:
    """The words that are compared, in lower case and without punctuation and articles, as SQuAD's evaluation does it.

    Other than there, punctuation between words divides them, numbers keep their signs and points, and a possessive is
    the word itself.

    >>> words_of("The lamp's price is: 1,000.50 crowns; don't pay -5, nor .5kg!")
    ['lamp', 'price', 'is', '1000.50', 'crowns', 'dont', 'pay', '-5', 'nor', '0.5', 'kg']
    """
    words = _WORD.findall(_THOUSANDS.sub("", _plain(text)))
    return [_NO_CENTS.sub(r"\1", _LEADING_POINT.sub(r"\g<1>0.", word)) for word in words if word not in ARTICLES]


def _plain(text: str) -> str:
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), unicodedata.normalize("NFKC", text))  # of any script
    return _POSSESSIVE.sub("", text.casefold()).translate(_ALIKE)


def _side_by_side(text: str) -> set[tuple[str, str]]:
    """Neighbours among the characters that each count as a word."""
    pairs = itertools.pairwise(_WORD.finditer(_plain(text)))
    whole = re.compile(rf"{_CHARACTER}{_MARK}*")
    return {
        (one[0], other[0])
        for one, other in pairs
        if one.end() == other.start() and whole.fullmatch(one[0]) and whole.fullmatch(other[0])
    }


def is_as_expected(answer: str, expected: str, question: str = "") -> bool:
    """Whether an answer says what the expected one does, see ``RULE``, by the question that was asked."""
    answer, expected = map(without_thoughts, (answer, expected))
    if is_json(expected):  # whose words the question often has all, and which may have none
        return _as_json(answer) == _as_json(expected)
    if not (wanted := words_of(expected)):  # an emoji, say, or the choice A
        return answer.strip() == expected.strip() or {*_CHOICE.findall(answer)} == {*_CHOICE.findall(expected)} != set()
    if _contradicts(answer, expected):
        return False
    asked = set(words_of(question))
    said = set(wanted) - SMALL_WORDS
    said = said - asked or said
    turned = _denies(answer, said) != _denies(expected, said) and not _is_denial(question)
    return not turned and _has_what_counts(answer, expected, question)


def _contradicts(answer: str, expected: str) -> bool:
    """Whether one says yes and the other no, or the answer names another letter first, or another currency."""
    both = answer, expected
    if {_SAYS_YES.get(word) for text in both for word in words_of(text)[:1]} >= {True, False}:
        return True
    letters, (letter, *_) = _CHOICE.findall(answer), [*_CHOICE.findall(expected), ""]
    if words_of(expected) == [letter.lower()] and letters and letters[0] != letter:
        return True
    here, there = ({each for each in text if unicodedata.category(each) == "Sc"} for text in both)
    return bool(here and there) and here.isdisjoint(there)


def without_thoughts(answer: str) -> str:
    """What a model that thinks aloud says behind its thoughts; nothing where these were cut short.

    >>> without_thoughts("<think>A capital.</think> Paris."), without_thoughts("<think>A capital, so Par")
    (' Paris.', '')
    """
    _, ended, behind = answer.rpartition(THINKING[1])
    return behind if ended else behind.partition(THINKING[0])[0]


def _denies(text: str, words: set[str]) -> bool:
    """Whether a part of a sentence that has any of the words denies something; what it says besides does not count."""
    return any(_is_denial(clause) and words.intersection(words_of(clause)) for clause in _CLAUSE.split(text))


def _is_denial(text: str) -> bool:
    text = _OR_NOT.sub(r"\1", text)
    return not _DENYING.isdisjoint(words_of(text)) or any(part in text for part in _DENYING_PARTS)


def has_phrase(words: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether the words of a phrase stand one after the other among others.

    >>> has_phrase(["it", "is", "new", "york"], ["new", "york"]), has_phrase(["yorkshire"], ["york"])
    (True, False)
    """
    return any(list(words[at : at + len(phrase)]) == list(phrase) for at in range(len(words) - len(phrase) + 1))


def is_json(text: str) -> bool:
    """Whether it is an object or a list of JSON, and so compared as such."""
    found = _as_json(text)
    return found is not None and found[0] in "{["


def _as_json(text: str) -> str | None:
    """The JSON of a text in a spelling of its own, in which true is not 1, and 1.0 is; None where it is none."""
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _asking(question: str) -> str:
    """What of a question asks; not the text that it is about, of which the answer may be a part.

    >>> _asking("Where does she work? Text: Ida left the mill. She works at the harbour.")
    'Where does she work?'
    """
    parts = _PARTS.split(question.strip())
    if len(parts) == 1:
        return question
    return " ".join(re.findall(r"[^.?!:\n]*\?", question)).strip() or parts[0]


def _alternatives(question: str, said: set[str]) -> tuple[set[str], set[str]]:
    """The one word of the expected ones that a question lets choose, as in red or blue, and those it is chosen from."""
    for pattern in _OR:  # of a list before the last comma may be no more than another part of the sentence
        listed = (words_of(found) for found in pattern.findall(question) if re.search(r"\bor\b|[/|]", found))
        options = {word for words in listed for word in words} - SMALL_WORDS - {"or"}
        if len(chosen := said & options) == 1 and len(options) > 1:
            return chosen, options - chosen
    return set(), set()


def _has_what_counts(answer: str, expected: str, question: str) -> bool:
    found, wanted = set(words_of(answer)), words_of(expected)
    said, asked = set(wanted) - SMALL_WORDS, set(words_of(_asking(question)))
    chosen, others = _alternatives(question, said)
    if others & found:
        return False
    counts = said - asked | chosen or said or set(wanted)  # a question may name all that can be answered
    missing = counts - found
    if any(map(_is_number, missing)):
        return False
    pairs = {pair for pair in _side_by_side(expected) if counts & found >= set(pair)}
    if len(pairs - _side_by_side(answer)) > len(pairs) * (1 - SHARE) + 1e-9:
        return False
    if len(missing) <= len(counts) * (1 - SHARE) + 1e-9:
        return True
    facts = counts & (set(filter(_is_number, wanted)) | names_in(expected))
    units = {unit for number, unit in itertools.pairwise(wanted) if _is_number(number)}
    return (
        bool(facts)
        and not missing & (facts | units | chosen | _TURNING)
        and len(missing) <= len(counts) * SHARE_WITH_NAMES
    )


def names_in(text: str) -> set[str]:
    """The words with a capital, but for one that begins a sentence alone.

    >>> sorted(names_in("The cafe is called The Eyepiece. Ada Byron meets visitors there. Visitors pay."))
    ['ada', 'byron', 'eyepiece']
    """
    text = unicodedata.normalize("NFKC", text)
    found, words = set(), list(_WORD.finditer(text))
    for word, later in itertools.zip_longest(words, words[1:]):
        before = text[: word.start()].rstrip()
        within = before and before[-1] not in ".!?:"
        if word.group()[0].isupper() and (within or (later and later.group()[0].isupper())):
            found.update(words_of(word.group()))
    return found


def _is_number(word: str) -> bool:
    return any(character.isdigit() for character in word)


def wilson(right: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of a share, of which ``right`` of ``n`` were seen (Wilson, JASA 22, 1927); 0 to 1 of nothing seen.

    >>> tuple(round(share, 3) for share in wilson(24, 30))
    (0.627, 0.905)
    """
    if not n:
        return 0.0, 1.0
    z, share = NormalDist().inv_cdf((1 + level) / 2), right / n
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (middle - half) / scale, (middle + half) / scale
    return (low if right else 0.0), (high if right < n else 1.0)  # as they are but for rounding
