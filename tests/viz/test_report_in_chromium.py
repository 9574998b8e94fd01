"""The report as a reader has it before them: in headless Chromium, pointed at, zoomed, by keyboard, light and dark."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from chromium import Browser, find
from folders import course, record, settings, write_run

from granite_scu import viz
from granite_scu.viz.report import write_report
from granite_scu.viz.run_folder import read_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find() is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]

PLOT = "#chart-s .plot"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser, finished):
    """The report of the finished run, open in a light window."""
    browser.open(write_report(read_run(finished), finished / "report.html"))
    yield browser
    assert browser.errors == []
    assert {address.split(":")[0] for address in browser.requests} == {"file"}


def place(browser, step: float, steps: float = 400, plot: str = PLOT) -> tuple[float, float]:
    """Where in the window a step lies while steps 0 to ``steps`` are shown."""
    left, top, _, height = browser.box(plot)
    ends = [float(browser.evaluate(f"document.querySelector('{plot} .axis').getAttribute('x{k}')")) for k in (1, 2)]
    return left + ends[0] + step / steps * (ends[1] - ends[0]), top + height / 2


def test_what_is_pointed_at_is_read_out_in_every_chart(opened, finished):
    run = read_run(finished)
    opened.mouse("mouseMoved", *place(opened, 203))
    index = run.column("step").tolist().index(200)
    assert opened.text("#readout") == "step 200 819,200 tokens"
    percent = [f"{float(f'{100 * run.column(name)[index]:.4g}'):g} %" for name in ("s", "s_ema", "s_target")]
    assert [opened.evaluate(f"document.querySelectorAll('#chart-s .legend b')[{k}].textContent") for k in range(3)] == (
        percent
    )
    assert f"λ {run.column('lambda')[index]:.4g}" in opened.text("#chart-lambda .legend")
    assert "validation 5.95" in opened.text("#chart-data_bpt .legend")
    cursors = [
        float(opened.evaluate(f"document.querySelectorAll('.cursor')[{k}].getAttribute('x1')")) for k in range(5)
    ]
    assert len(set(cursors)) == 1, "one cursor for all charts"


def test_a_validation_between_two_ticks_says_when_it_was(opened):
    opened.mouse("mouseMoved", *place(opened, 290))
    assert "validation 5.95 (step 200)" in opened.text("#chart-data_bpt .legend")
    opened.mouse("mouseMoved", *place(opened, 20))
    assert "validation \N{EN DASH}" in opened.text("#chart-data_bpt .legend")


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(opened):
    left, right = place(opened, 100), place(opened, 202)
    opened.drag(left, right)
    assert "shown: steps 100 to 20" in opened.text("#readout")
    assert axis(opened, "s") == axis(opened, "lambda") and axis(opened, "s")[0] >= 100 and axis(opened, "s")[-1] <= 203
    assert opened.evaluate("document.getElementById('reset').disabled") is False
    for clicks in (1, 2):
        opened.mouse("mousePressed", *left, clicks=clicks)
        opened.mouse("mouseReleased", *left, clicks=clicks)
    assert "shown" not in opened.text("#readout") and axis(opened, "s")[-1] == 400


def axis(browser, chart: str) -> list[int]:
    """The steps that stand below a chart."""
    return browser.evaluate(
        f"[...document.querySelectorAll('#chart-{chart} text.step')].map(each => +each.textContent)"
    )


def test_no_two_lines_of_an_axis_have_the_same_number(browser, tmp_path):
    history = [record(10 * k, data_bpt=12.477 + 2.5e-5 * k) for k in range(1, 41)]
    folder = write_run(tmp_path / "run", history, {}, settings())
    browser.open(write_report(read_run(folder), folder / "report.html"))
    words = "[...document.querySelectorAll('#chart-data_bpt text:not(.step)')].map(each => each.textContent)"
    numbers = browser.evaluate(words)
    assert len(numbers) > 4 and len(set(numbers)) == len(numbers)


def test_the_keyboard_does_it_too(opened):
    opened.evaluate(f"document.querySelector('{PLOT}').focus()")
    assert opened.text("#readout").startswith("step 400")
    for key, expected in (("ArrowLeft", 390), ("ArrowLeft", 380), ("PageDown", 280), ("Home", 10), ("ArrowRight", 20)):
        opened.key(key)
        assert opened.text("#readout").startswith(f"step {expected} ")
        assert opened.evaluate(f"document.querySelector('{PLOT}').getAttribute('aria-valuenow')") == str(expected)
    said = opened.evaluate(f"document.querySelector('{PLOT}').getAttribute('aria-valuetext')")
    assert said.startswith("step 20: S at each tick ") and "S* 2 %" in said
    opened.key("+")
    assert "shown: steps" in opened.text("#readout")
    opened.key("End")
    assert axis(opened, "s")[-1] == 400, "the range follows the cursor"
    opened.key("0")
    assert "shown" not in opened.text("#readout")


def test_a_term_opens_by_keyboard_and_by_pointer_without_a_script(opened):
    shown = (
        "[...document.querySelectorAll('[popover]')].filter(each => each.matches(':popover-open')).map(each => each.id)"
    )
    opened.evaluate("document.querySelector('[popovertarget=term-s]').focus()")
    opened.key(" ")
    assert opened.evaluate(shown) == ["term-s"] and "ParamBPT / (DataBPT" in opened.text("#term-s")
    opened.key(" ")
    assert opened.evaluate(shown) == []
    left, top, width, height = opened.box("[popovertarget='term-lambda']")
    finger = (left + width / 2 + 8, top + height / 2)  # beside the letter
    opened.mouse("mousePressed", *finger, clicks=1)
    opened.mouse("mouseReleased", *finger, clicks=1)
    assert opened.evaluate(shown) == ["term-lambda"]
    assert "popover" not in Path(viz.__file__).with_name("assets").joinpath("report.js").read_text(encoding="utf-8")


def test_hidden_it_has_no_width_and_draws_when_it_is_shown_again(opened):
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    for display, width in (("none", 0), ("", 900)):
        opened.evaluate(f"document.querySelector('main').style.display = '{display}'; {frames}")
        assert opened.evaluate(f"document.querySelector('{PLOT}').clientWidth") >= width
    assert opened.evaluate(f"document.querySelector('{PLOT} svg').viewBox.baseVal.width") >= 900


def test_the_buttons_zoom(opened):
    for _ in range(2):
        opened.evaluate("document.getElementById('in').click()")
    assert "shown: steps 300 to 400" in opened.text("#readout")
    opened.evaluate("document.getElementById('out').click()")
    assert "shown: steps 200 to 400" in opened.text("#readout")
    opened.evaluate("document.getElementById('reset').click()")
    assert "shown" not in opened.text("#readout")


def test_the_lines_are_where_the_numbers_are(opened, finished):
    lam = read_run(finished).column("lambda")
    trace = opened.evaluate("document.querySelector('#chart-lambda path.line').getAttribute('d')")
    corners = trace.replace("M", "").replace("V", ",").split("H")
    heights = np.array([float(corner.split(",")[-1]) for corner in corners])
    assert len(heights) == len(lam)
    slopes = np.diff(heights) / np.diff(np.log(lam))
    assert slopes == pytest.approx(slopes[0], abs=2), "a logarithmic axis"
    assert slopes[0] < 0


@pytest.mark.parametrize("width", [1200, 400])
def test_the_path_of_what_was_learned_against_drift_is_read_at_the_cursor(browser, held, width):
    browser.open(write_report(read_run(held), held / "report.html"), width=width)
    assert browser.evaluate(TROUBLE) == [] and browser.errors == []
    legend = "#chart-learned .legend"
    words = " ".join(browser.text(legend).split())
    assert "5.9 at 2.013 %, step 400" in words and "at most 2 %" in words and "kept: step 300" in words
    browser.evaluate("document.querySelector('#chart-learned .plot').focus()")
    for key in ("Home", *["PageUp"] * 2):
        browser.key(key)
    assert "5.95 at 2.164 %, step 200" in " ".join(browser.text(legend).split())
    # Step 100: the middle of the open dot.
    dot = "#chart-learned circle.blue.held"
    left, top, across, high = browser.box(dot)
    browser.mouse("mouseMoved", left + across / 2, top + high / 2)
    assert browser.text("#readout").startswith("step 100 ")
    assert axis(browser, "drift") == axis(browser, "lambda")


FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def unfold(browser) -> None:
    """Open all that is folded, and let it be drawn."""
    browser.evaluate(f"document.querySelectorAll('details').forEach(each => each.open = true); {FRAMES}")


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize(
    ("low", "high"),
    [(5e-7, 2e-6), (1e-7, 1e4), (0.9, 1.1), (0.2, 19.3), (3e-7, 3e-7), (0.02, 0.021), (2e3, 9e3), (1e-5, 0.4)],
)
def test_all_words_of_the_charts_are_whole_and_apart(browser, tmp_path, low, high, width):
    """In the window, at a zoom, and while they were folded when they were drawn first."""
    history = course(low, high)
    for tick, step in zip(history, (1, 2, 30, 400, 5000, 60_000, 70_000, 10**5, 10**6, 10**7), strict=False):
        tick["step"] = step
    folder = write_run(tmp_path / "run", history[:10], {"controller": "pi", "target_s": None}, settings())
    browser.open(write_report(read_run(folder), folder / "report.html"), width=width)
    unfold(browser)
    for clicks in (0, 6):
        for _ in range(clicks):
            browser.evaluate("document.getElementById('in').click()")
        assert browser.evaluate(TROUBLE) == []


TROUBLE = """(() => {
  const found = [], touch = (a, b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  for (const svg of document.querySelectorAll('.plot svg')) {
    const whole = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')];
    const boxes = texts.map(text => text.getBoundingClientRect());
    if (texts.length < 4) found.push(`${svg.parentNode.parentNode.id} has but ${texts.length} words`);
    boxes.forEach((box, k) => {
      if (box.left < whole.left - 0.5 || box.right > whole.right + 0.5 || box.bottom > whole.bottom + 0.5)
        found.push(`cut: ${texts[k].textContent}`);
      for (let m = 0; m < k; m++)
        if (touch(box, boxes[m])) found.push(`crossing: ${texts[k].textContent}, ${texts[m].textContent}`);
    });
  }
  return found;
})()"""
"""What is wrong with the words in the charts, a line each."""


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window_and_follows_the_scheme(browser, finished, tmp_path, scheme, width):
    page = write_report(read_run(finished), finished / "report.html")
    browser.open(page, width=width, scheme=scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ground = pixel(browser.screenshot(tmp_path / f"{scheme}.png"), 3, 3)
    assert min(ground) > 240 if scheme == "light" else max(ground) < 40
    contrast = browser.evaluate(
        "(() => { const style = getComputedStyle(document.body);"
        "const light = text => { const [r, g, b] = text.match(/\\d+/g).map(value => (value / 255) ** 2.2);"
        "return 0.2126 * r + 0.7152 * g + 0.0722 * b; };"
        "const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);"
        "return (a + 0.05) / (b + 0.05); })()"
    )
    assert contrast > 10


def pixel(file: Path, x: int, y: int) -> tuple[int, ...]:
    """Red, green and blue of a pixel, from 0 to 255."""
    return tuple(round(255 * value) for value in matplotlib.image.imread(file)[y, x, :3])


def test_runs_that_were_cut_off_or_measured_little_are_drawn(browser, cut_off, tmp_path):
    gaps = [record(10 * k, s=None if k % 2 else 0.02, data_bpt=None, **{"lambda": 0.0}) for k in range(1, 6)]
    folders = (
        cut_off,
        write_run(tmp_path / "one", [record(10)], {}, settings()),
        write_run(tmp_path / "gaps", gaps, {}, settings()),
        write_run(tmp_path / "nothing", [record(10, s=None, s_ema=None, data_bpt=None)], {}, settings()),
    )
    for folder in folders:
        browser.open(write_report(read_run(folder), folder / "report.html"))
        assert browser.errors == []
    browser.open(folders[2] / "report.html")
    assert browser.evaluate("document.querySelectorAll('#chart-s circle.sky').length") == 2, "a lone point is a dot"
