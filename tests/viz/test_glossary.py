"""The terms of a report: each can be opened, by pointer, touch and keyboard, and without a script."""

import re

from granite_scu.viz.glossary import TERMS, explain_terms
from granite_scu.viz.report import build_report
from granite_scu.viz.run_folder import read_run


def test_every_term_is_a_button_where_it_is_first_used():
    words = "S against S*, λ, DataBPT and ParamBPT at every tick; S again, ticks again, Steps"
    html = explain_terms(words)
    assert re.findall(r">([^<]+)</button>", html) == ["S", "S*", "λ", "DataBPT", "ParamBPT", "tick"]
    assert re.sub(r"<[^>]+>", "", html) == words, "nothing else has changed"


def test_every_button_of_a_page_opens_an_explanation(finished):
    page = build_report(read_run(finished))
    targets = set(re.findall(r'popovertarget="([^"]+)"', page))
    there = re.findall(r'<div popover id="([^"]+)"', page)
    assert len(there) == len(set(there)) == len(TERMS)
    assert targets == set(there), "every term is used, and what is opened is there"
