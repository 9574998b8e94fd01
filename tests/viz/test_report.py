"""The report's HTML, read without a browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from folders import METRICS, holding, record, rising, settings, write_csv, write_run

from granite_scu.cli.main import main
from granite_scu.config.errors import UserError
from granite_scu.storage.run_folder import LOG_FILES
from granite_scu.viz.report import build_report, write_report
from granite_scu.viz.report_data import MAX_TICKS, thinned
from granite_scu.viz.run_folder import read_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'both'"


class Page(HTMLParser):
    """Text, scripts and what would be fetched."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.data: dict = {}
        self._inside: tuple[str, str | None] = ("", None)
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = (tag, dict(attributes).get("id"))
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]

    def handle_data(self, text):
        if self._inside == ("script", "run-data"):
            self.data = self.data or json.loads(text)
        elif self._inside[0] not in ("script", "style"):
            self.words.append(text)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def page(folder: Path) -> Page:
    return Page(build_report(read_run(folder)))


def test_it_says_what_came_of_the_run(finished):
    text = page(finished).text
    assert "Learned your data: held-out text costs 5.850 bits per token (base 6.500)." in text
    assert "Held-out documents: 5.850 bits per token on 14,088 tokens, base 6.500 (\N{MINUS SIGN}10.0 %)." in text
    assert "S settled at step 130. It overshot S* by 4 %. Once within ±10 % of S* it was there at 96 %" in text
    assert "The run ended after its last step, 400." in text
    assert "best validation5.9bits per token, step 400" in text
    assert "wall time2 minutes2,000 tokens/s" in text


@pytest.mark.parametrize(("last", "scale"), [(0.41, "linear"), (0.39, "log")])
def test_a_loss_that_falls_by_more_than_ten_times_has_a_logarithmic_axis(tmp_path, last, scale):
    ticks = [record(10, data_bpt=4.0), record(20, data_bpt=last)]
    found = page(write_run(tmp_path / "run", ticks, {"controller": "none"}, settings(), metrics=METRICS))
    assert found.data["charts"][0]["scale"] == scale and "bits per token, training text" not in found.text


@pytest.mark.parametrize(("units", "more"), [("documents", ""), ("windows", " The interval is over windows")])
def test_of_a_run_that_was_scored_afterwards_it_has_the_verdict(finished, units, more):
    assert "no interval is given" in page(finished).text
    pairs = [{"a": "base", "b": "run", "verdict": "run is better than base by 0.5 <bits>"}]
    (finished / "eval_bpt.json").write_text(json.dumps({"units": units, "pairs": pairs}))
    text = page(finished).text
    assert f"Scored by granite-scu eval: run is better than base by 0.5 <bits>.{more}" in text
    assert "no interval is given" not in text


def test_figures_that_no_run_writes_do_not_break_it(tmp_path):
    control = {"settling_time": "soon", "iae": 0.1}
    metrics = METRICS | {"base_test_bpt": 0.0, "test_is_validation": True, "control": control}
    text = page(write_run(tmp_path / "run", rising(), {}, settings(), metrics=metrics)).text
    assert "Validation documents: 5.850 bits per token on 14,088 tokens, base 0.000." in text
    assert "validation text5.85bits per token, base 0" in text and "S settled" not in text
    folder = write_run(tmp_path / "other", [record(10, skipped="two")], {}, settings())
    with pytest.raises(UserError, match="skipped is not a number"):
        page(folder)


def test_a_huge_value_has_room_in_its_tile(tmp_path):
    huge = [record(10, param_bpt=1.2345e15, data_bpt=12_345_678.0, **{"lambda": 1e30})]
    source = build_report(read_run(write_run(tmp_path / "run", huge, {}, settings())))
    tiles = re.findall(r"<dd>(.*?)<small>", source)
    assert {"1.23e+15", "1.23e+07", "1e+30"} < set(tiles) and max(map(len, tiles)) <= 10


def test_of_a_run_from_an_adapter_it_says_what_that_scored(tmp_path):
    started = settings(start={"adapter": "mine/best", "sha256": "0123"})
    text = page(write_run(tmp_path / "run", rising(), {}, started, metrics=METRICS | {"start_test_bpt": 6.0321})).text
    assert "10.0 %). The adapter, mine/best, that training started from had 6.032. One run, one seed" in text
    assert "Adapter at the startadaptermine/bestsha2560123" in text


def test_configuration_and_environment_are_there_and_what_was_not_set_is_not(finished):
    text = page(finished).text
    for words in ("learning_rate0.001", "pathstdlib-docs", "torch2.13.0", "device.nameAMD EPYC", "seed42"):
        assert words in text
    assert "lambda_init" not in text and "profiler" not in text and "detect_anomaly" not in text


def test_the_charts_have_the_histories_own_numbers(finished):
    run, data = read_run(finished), page(finished).data
    assert data["steps"] == run.column("step").tolist()
    for name in ("s", "s_ema", "s_target", "lambda", "data_bpt", "param_bpt", "tokens_per_s"):
        np.testing.assert_allclose(data["columns"][name], run.column(name), rtol=1e-5)
    assert data["validations"] == [[100, 6.1], [200, 5.95], [300, 5.92], [400, 5.9]]
    units = {chart["name"]: chart["unit"] for chart in data["charts"]}
    assert units["data_bpt"] == "bits per token" and units["s"] == "share of bits" and units["lambda"] == "no unit"


def test_the_table_has_the_last_ticks(finished):
    source = build_report(read_run(finished))
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", source)
    assert len(rows) == 12
    last = rising()[-1]
    cells = [
        "400",
        *(f"{100 * last[name]:.3g}\N{NO-BREAK SPACE}%" for name in ("s", "s_ema", "s_target")),
        *(f"{last[name]:.4g}" for name in ("lambda", "data_bpt", "param_bpt")),
        "5.9",
        "2,000",
    ]
    assert rows[-1].split("</td><td>") == cells


def test_nothing_is_fetched_and_only_its_own_script_may_run(finished):
    source = build_report(read_run(finished))
    assert Page(source).addresses == []
    assert "default-src 'none'" in source and "unsafe-inline" not in source
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source)
    assert "style=" not in source, "the policy would not let it act"


def test_what_the_folder_tells_is_escaped(tmp_path):
    texts = {"base": {"name": EVIL}, "data": {"path": EVIL}, "lora": {EVIL: EVIL}, "git_revision": EVIL, "seed": EVIL}
    folder = write_run(
        tmp_path / "<b>run<b> & co",
        [record(10)],
        {"controller": EVIL},
        settings(**texts),
        metrics={"stopped": {"reason": EVIL, "step": EVIL}, "reachability": {"advice": EVIL}},
    )
    (folder / LOG_FILES["cpu"]).write_text(f"2026-01-01 00:00:00,000 WARNING {EVIL}\n")
    read = page(folder)
    assert read.tags.count("script") == 2 and not {"img", "b"} & set(read.tags)
    assert "<b>run<b> & co" in read.text and read.text.count("<img src=x onerror=alert(2)>") >= 6


def test_a_name_that_is_no_utf_8_is_written_as_its_code(tmp_path):
    folder = write_run(tmp_path / "run", rising(), {}, settings(data={"path": "chats\udcff.jsonl"}), metrics=METRICS)
    text = write_report(read_run(folder), folder / "page.html").read_text(encoding="utf-8")
    assert "data chats\\udcff.jsonl" in text


def test_of_an_absolute_path_only_the_last_name_is_shown(tmp_path):
    changed = settings(data={"path": "/home/me/secret/texts"}, base={"name": "C:\\models\\mine"})
    text = page(write_run(tmp_path / "run", [record(10)], {}, changed)).text
    assert "…/texts" in text and "…/mine" in text
    assert "secret" not in text and "models" not in text and str(tmp_path) not in text


def test_a_run_that_was_cut_off_is_drawn_as_far_as_it_got(cut_off):
    read = page(cut_off)
    assert read.data["steps"] == list(range(10, 121, 10)) and read.data["validations"] == [[100, 6.1]]
    assert "The run has not come to its end: recorded up to step 120 of 400." in read.text
    assert "The run is unfinished" in read.text and "wall time" not in read.text


def test_a_history_alone_is_enough(tmp_path):
    (tmp_path / "scu_history.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    text = page(tmp_path).text
    assert "its training_config.json is missing" in text
    assert "Nothing was measured: S is null at every tick." in text
    assert text.count("Not measured at any tick.") == 4 and "λ was not recorded." in text


def test_lambda_of_zero_is_said_in_words(tmp_path):
    history = [record(10 * k, s_target=None, **{"lambda": 0.0}) for k in range(1, 5)]
    text = page(write_run(tmp_path / "run", history, {"controller": "none"}, settings())).text
    assert "λ = 0 throughout: nothing was steered." in text and "no setpoint" in text and "S*" not in text.split("λ")[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"skipped": 3}, "3 optimizer steps were skipped"),
        ({"held": True}, "4 of 4 ticks had no usable measurement"),
        ({"saturated": True}, "λ stood at its lower bound, 1, at 100 % of the ticks"),
        ({"saturated": True}, "--controller none does the same"),
    ],
)
def test_what_went_wrong_is_among_the_warnings(tmp_path, changes, words):
    history = [record(10 * k, **changes) for k in range(1, 5)]
    assert words in page(write_run(tmp_path / "run", history, {}, settings())).text


def test_a_run_without_trouble_has_no_notes(finished):
    assert "Notes" not in page(finished).text


def test_the_reader_comes_to_the_controller_last(finished, tmp_path):
    ticks = [record(10 * k, s_target=None) for k in range(1, 5)]
    free = write_run(tmp_path / "free", ticks, {"controller": "fixed"}, settings(), [(40, 6.1)])
    for folder, opened in ((finished, True), (free, False)):
        source = build_report(read_run(folder))
        places = [source.index(words) for words in (
            'class="lede"', "What now", 'id="chart-data_bpt"', '<details id="controller"', 'id="chart-s"',
            'id="chart-lambda"', "<h2>Configuration",
        )]  # fmt: skip
        assert places == sorted(places)
        assert ('<details id="controller" open>' in source) == opened, "where a setpoint was asked for"


def test_of_a_run_that_held_drift_what_it_learned_is_drawn_against_that(held, finished):
    run = read_run(held)
    found = page(held)
    charts = {each["name"]: each for each in found.data["charts"]}
    validated = {100: 6.1, 200: 5.95, 300: 5.92, 400: 5.9}
    path = [[step, run.column("drift")[step // 10 - 1], bits] for step, bits in validated.items()]
    assert charts["learned"]["path"] == [pytest.approx(point, rel=1e-5) for point in path]
    assert [charts["learned"][name] for name in ("budget", "kept", "keptPoint")] == [0.02, 300, [0.021, 5.92]]
    assert found.data["columns"]["drift"] == pytest.approx(run.column("drift"), rel=1e-5)
    assert "drifted by 2.1\N{NO-BREAK SPACE}% (budget 2\N{NO-BREAK SPACE}%, exceeded" in "".join(found.words)
    assert '<details id="controller" open>' in build_report(run), "what was asked for is not folded away"
    assert 'aria-label="Learned against drifted, bits per token, over drift in % of the base&#x27;s bits"' in (
        build_report(run)
    )
    assert "The adapter is that of step 300, which validated best within the budget" in found.text
    assert "Let S settle" not in found.text and "S settled" not in found.text
    assert "learned" not in {each["name"] for each in page(finished).data["charts"]}


def test_without_validations_the_path_is_of_the_ticks(tmp_path):
    folder = write_run(tmp_path / "run", holding(4), {"controller": "pi"}, settings())
    assert [step for step, *_ in read_run(folder).drift_path] == [10, 20, 30, 40]
    ended = write_run(tmp_path / "ended", holding(40), {}, settings(), [(5, 7.0), (100, 6.1)], METRICS)
    assert [step for step, *_ in read_run(ended).drift_path] == [100, 400], "the last validation has no row"


def test_of_a_run_that_was_scaled_and_validated_nothing_no_place_on_the_path_is_that_of_the_adapter(tmp_path):
    for scale, there in ((1.0, True), (0.5, False)):
        metrics = METRICS | {"final_val_bpt": None, "drift": {"budget": 0.02, "share": 0.02, "scale": scale}}
        folder = write_run(tmp_path / f"run-{scale}", holding(), {"controller": "pi"}, settings(), metrics=metrics)
        assert bool(read_run(folder).kept_places) == there


def test_a_validation_that_is_no_number_is_no_place_on_the_path(held):
    write_csv(held / "logs" / "csv" / "metrics.csv", [(100, 6.1), (200, "nan"), (300, 5.92)])
    charts = {each["name"]: each for each in page(held).data["charts"]}
    assert [step for step, *_ in charts["learned"]["path"]] == [100, 300, 400]


def test_what_was_not_measured_is_said_and_not_shown(tmp_path):
    """A run that held nothing out and asked no questions; as it writes its summary."""
    metrics = METRICS | dict.fromkeys(("base_test_bpt", "adapter_test_bpt", "final_val_bpt", "best_val_step"))
    folder = write_run(tmp_path / "run", rising(), {"controller": "none"}, settings(), metrics=metrics)
    text = page(folder).text
    for words in ("What was learned is not known", "What else it changed was not tried", "No controller: the size of"):
        assert words in text
    for words in (
        "and validation",
        "best validation",
        "Answers",
        "as expected",
        "Held-out documents",
        "Make sure",
        "Train longer",
    ):
        assert words not in text.partition("All settings")[0]


def test_notes_of_the_start_and_what_the_data_decided_stand_in_it_once(finished):
    line = "2026-01-01 00:00:00,000 INFO {}\n".format
    said = line("note: --batch-size 9 does not <fit>") + line("chosen: learning rate 5e-4: for the width")
    (finished / LOG_FILES["cpu"]).write_text(2 * said + line("training"))
    read = page(finished)
    assert read.text.count("--batch-size 9 does not <fit>") == 1
    assert read.text.count("learning rate 5e-4: for the width") == 1


def test_a_long_run_is_thinned_to_its_extremes_and_stays_small(tmp_path):
    ticks = 20_000
    history = [record(k + 1, s=0.02 + 1e-9 * k, **{"lambda": 1 + 1e-6 * k}) for k in range(ticks)]
    history[11_234]["s"], history[14_235]["lambda"], history[7]["s"] = 0.9, 1e-4, None
    for each in history:
        each |= {"drift": 0.02, "drift_target": 0.02}
    history[15_236]["drift"] = 0.5
    folder = tmp_path / "run"
    write_run(folder, history, {}, settings())
    run = read_run(folder)
    kept = thinned(run)
    assert {0, 7, 11_234, 14_235, 15_236, ticks - 1} <= set(kept.tolist()) and len(kept) <= MAX_TICKS
    assert np.diff(kept).max() < 100, "no stretch is left out"
    source = build_report(run)
    assert len(source.encode()) < 1_000_000
    assert f"Of 20,000 ticks {len(kept):,} are drawn" in source


def test_a_validation_that_is_no_number_is_a_gap(finished):
    write_csv(finished / "logs" / "csv" / "metrics.csv", [(100, "nan"), (200, 5.8)])
    read = page(finished)
    assert read.data["validations"] == [[100, None], [200, 5.8], [400, 5.9]] and "5.8bits per token" in read.text


# The command.


def test_the_command_writes_into_the_run_or_where_it_is_told(finished, tmp_path, capsys):
    assert main(["report", str(finished)]) == 0
    assert main(["report", str(finished), "--out", str(tmp_path / "new" / "mine.html")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(finished / "report.html"), str(tmp_path / "new" / "mine.html")]
    link = tmp_path / "link.html"
    link.symlink_to("linked.html")
    assert main(["report", str(finished), "--out", str(link)]) == 0
    assert link.is_symlink() and (tmp_path / "linked.html").is_file() and capsys.readouterr().out == f"{link}\n"
    assert (finished / "report.html").read_bytes() == (tmp_path / "new" / "mine.html").read_bytes()


def test_what_it_cannot_do_is_one_line_and_leaves_nothing(finished, tmp_path, capsys):
    nothing = write_run(tmp_path / "nothing", [record(10, s=None, data_bpt=None)], {}, settings())
    (finished / "file").touch()
    deep = write_run(tmp_path / "deep", [record(10)], {}, settings())
    (deep / "scu_config.json").write_text('{"setpoint": ' + "[" * 500 + "]" * 500 + "}")
    refused = {
        (deep,): "nested too deeply",
        (tmp_path / "missing",): "no such folder",
        (tmp_path,): "has neither scu_history.json",
        (nothing,): "nothing was measured in its 1 tick",
        (finished, "--out", finished): "is a folder; name a file",
        (finished, "--out", finished / "file" / "report.html"): "is a file, and not a folder",
    }
    for arguments, words in refused.items():
        assert main(["report", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line
    assert not list(tmp_path.rglob("*.html")) and not list(tmp_path.rglob("*.tmp"))
