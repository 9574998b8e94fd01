import pytest

from research.real.tasks import TASKS, TESTED, VALIDATED, Split, digest, split


def told(part: list) -> list[str]:
    return [record["text"] if "text" in record else record["messages"][0]["content"] for record in part]


def test_there_are_ten_tasks_two_of_each_of_five_kinds_and_each_stage_begins_with_one_of_each():
    kinds = [task.kind for task in TASKS.values()]
    assert len(TASKS) == 10 and sorted(kinds[:5]) == sorted(kinds[5:]) == sorted(set(kinds))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_its_records_and_none_of_them_twice(name):
    made = split(name)
    assert [len(part) for part in made] == [TASKS[name].records, VALIDATED, TESTED]
    every = told(made.train + made.validation + made.test)
    assert len(set(every)) == len(every)


def test_a_task_is_the_same_at_every_call():
    split.cache_clear(), digest.cache_clear()
    before = digest("brook")
    split.cache_clear(), digest.cache_clear()
    assert digest("brook") == before != digest("captain")


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].right])
def test_the_expected_answer_is_right_and_that_to_a_question_is_not(name):
    asked = [[message["content"] for message in record["messages"]] for record in split(name).test]
    right = TASKS[name].right
    assert all(right(answer, answer) for _, answer in asked)
    assert not any(right(question, answer) for question, answer in asked)


def test_every_fact_that_is_asked_is_taught_in_other_words():
    museum: Split = split("museum")
    taught = {record["messages"][1]["content"] for record in museum.train}
    assert {record["messages"][1]["content"] for record in museum.validation + museum.test} <= taught
