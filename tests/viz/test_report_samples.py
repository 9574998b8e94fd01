"""Two test documents, continued by base model and adapter, on the page."""

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
