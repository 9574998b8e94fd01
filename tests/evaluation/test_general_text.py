"""General text: what the base model writes, files of the user's, its parts and its batches."""

from granite_scu.evaluation.general_text import Document, GeneralText, batches

IGNORED = -100


def document(*tokens: int, skip: int = 1) -> Document:
    """A document whose first ``skip`` tokens are not counted."""
    return Document(tokens, tuple(number >= skip for number in range(len(tokens))))


def test_parts_share_no_document_and_stay_where_they_are_when_some_are_added():
    every = tuple(document(number, number) for number in range(11))
    parts = GeneralText(every, "auto").parts()
    assert parts.anchor == tuple(every[number] for number in (0, 1, 4, 5, 8, 9))
    assert parts.steering == (every[2], every[6], every[10]) and parts.held_out == (every[3], every[7])
    fewer = GeneralText(every[:8], "auto").parts()
    assert parts.held_out == fewer.held_out and parts.steering[:2] == fewer.steering


def test_a_batch_has_a_document_a_row_padded_at_its_end_with_its_labels_shifted():
    some = [document(1, 2, 3, 4, skip=2), document(5, 6, 7), document(*range(20, 40))]
    first, second = batches(some, 32, padding=0)
    assert first["input_ids"].tolist() == [[1, 2, 3] + [0] * 13, [5, 6] + [0] * 14]
    assert first["labels"].tolist() == [[IGNORED, 3, 4] + [IGNORED] * 13, [6, 7] + [IGNORED] * 14]
    assert second["input_ids"].shape == (1, 32), "19 positions, a multiple of 16"
    assert second["labels"][0].tolist() == [*range(21, 40)] + [IGNORED] * 13
    counted = sum(int((batch["labels"] != IGNORED).sum()) for batch in (first, second))
    assert counted == sum(each.n_counted for each in some)
