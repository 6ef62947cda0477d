"""report.html in a real browser: contents, controls, and hostile texts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plugins.report.page import write_report
from tests.plugins.report.report_runs import EVIL, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.full
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PATIENCE_MS = 300_000

Open = Callable[..., "Page"]


def expect(shown: Page | Locator) -> Any:
    """Return playwright's `expect`. Imported here, because only the full tier has playwright."""
    from playwright.sync_api import expect as expect_of_playwright

    return expect_of_playwright(shown)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect as expect_of_playwright
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.fail("the report is tested in a browser, and there is none; install one: apt-get install chromium")
    expect_of_playwright.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of reports: of a run, of a run with hostile texts, of a supervised run, of two runs."""
    base = tmp_path_factory.mktemp("reports")
    one = write_run(base / "one")
    evil = write_run(base / "evil", evil=True, steps=2)
    two = write_run(base / "two", learning_rate=0.3, steps=8)
    supervised = write_run(base / "supervised", steps=2)
    shutil.rmtree(supervised / "rollouts")
    with (supervised / "metrics.jsonl").open("a") as file:
        file.write('{"actor/pg_loss": 0.5, "step": 1}\n')
    for runs, name in (([one], "one"), ([evil], "evil"), ([supervised], "supervised"), ([one, two], "both")):
        write_report(runs, base / f"{name}.html")
    return base


@pytest.fixture
def show(browser: Browser, folder: Path) -> Iterator[Open]:
    """Yield a function that opens a report. At the end, no page may have logged errors or requested another file."""
    pages = []
    complaints = []

    def open_page(name: str, width: int = 1200, expected: str = "", **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complain = lambda text: None if expected and expected in text else complaints.append(text)
        page.on("console", lambda message: complain(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        file = (folder / f"{name}.html").as_uri()
        page.on(
            "request", lambda r: complaints.append(r.url) if not r.url.startswith((file, "data:", "blob:")) else None
        )
        page.goto(file)
        page.wait_for_selector("#rollouts")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert complaints == []


def scroll_through(page: Page) -> None:
    """Scroll through the page, because charts are drawn when they become visible."""
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    for card in page.locator(".chart:visible").all():
        card.scroll_into_view_if_needed()
        expect(card.locator("canvas")).to_have_count(1)


def is_painted(page: Page, selector: str) -> bool:
    return page.locator(selector).first.evaluate(
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v, i) => i % 4 === 3 && v > 0)"
    )


def test_the_page_shows_outcome_alarms_and_changed_options(show: Open) -> None:
    page = show("one")
    expect(page.locator(".outcome")).to_contain_text(re.compile(r"0\.250\b.*\b0\.750"))
    expect(page.locator(".alarm")).to_contain_text(re.compile("kl blow up.*step 2"))
    expect(page.locator("#changed")).to_contain_text("train.learning_rate")
    expect(page).to_have_title("one · run report")


def test_the_full_navigation_is_visible_on_a_phone(show: Open) -> None:
    page = show("one", width=390)
    links = page.locator("nav a, nav button").all()
    assert len(links) >= 7
    for link in links:
        box = link.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_every_metric_has_a_curve_in_its_row(show: Open) -> None:
    page = show("one")
    scroll_through(page)
    names = page.locator(".chart h4").all_text_contents()
    assert set(names) == {"reward/score", "eval/score", "actor/entropy", "timing_s/step", "mine/own"}
    assert page.locator(".row h3").all_text_contents()[0].startswith("Scores and losses")
    assert is_painted(page, ".chart canvas")
    assert is_painted(page, ".lanes canvas")


def test_a_cursor_is_shared_by_all_charts_and_moves_by_keys(show: Open) -> None:
    page = show("one")
    scroll_through(page)
    page.locator(".chart").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    for name in ("reward/score", "actor/entropy"):
        chart = page.locator(".chart", has=page.get_by_role("heading", name=name))
        expect(chart.locator(".readout")).to_contain_text("step 2")


def test_all_charts_keep_one_range_of_steps(show: Open) -> None:
    page = show("supervised")
    ranges = lambda: page.evaluate("[...new Set([...charts].map((c) => `${c.u.scales.x.min} ${c.u.scales.x.max}`))]")
    page.evaluate("document.querySelector('#curves').scrollIntoView({behavior: 'instant'})")
    box = page.locator(".chart .u-over").first.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, y, steps=5)
    page.mouse.up()
    scroll_through(page)  # actor/policy_loss has only step 1; some charts are only drawn now
    (shown,) = ranges()
    low, high = map(float, shown.split())
    assert 0.45 < low < 0.55 and 1.85 < high < 1.95
    page.locator("#smoothing").fill("0.5")  # draws the charts again
    page.wait_for_function("shown => [...charts].every((c) => shown.startsWith(c.u.scales.x.min))", arg=shown)
    page.locator(".chart .u-over").last.dblclick()
    page.wait_for_function("[...charts].every((c) => c.u.scales.x.min === 0 && c.u.scales.x.max === 2)")


def test_keyboard_shortcuts_of_the_browser_still_work(show: Open) -> None:
    page = show("one")
    scroll_through(page)
    press = """([where, options]) => document.querySelector(where).dispatchEvent(
        new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true, cancelable: true, ...options}))"""
    for where in (".chart", ".lanes canvas", ".response"):
        taken = [not page.evaluate(press, [where, {key: True}]) for key in ("shiftKey", "ctrlKey", "metaKey", "altKey")]
        assert taken == [True, False, False, False], where


def test_a_chart_shows_the_name_that_verl_uses(show: Open) -> None:
    chart = show("supervised").locator(".chart", has_text="actor/policy_loss")
    expect(chart).to_have_attribute("title", re.compile("In verl: actor/pg_loss"))


def test_steps_between_marks_are_interpolated(show: Open) -> None:
    page = show("one")
    # Steps 2 to 10 have no mark. Each is assumed to take 10 s.
    line = {"training": 0, "steps": [[1, 10], [11, 110], [12, 120]]}
    ended = page.evaluate("line => [5, 10, 55, 109, 110, 115, 130].map((t) => stepsBy(line, t))", line)
    assert ended == [0, 1, 5, 10, 11, 11, 12]
    assert page.evaluate("line => [0, 1, 6, 11, 99].map((s) => endOf(line, s))", line) == [0, 10, 60, 110, 120]
    # Steps 2 and 3 were repeated.
    again = {"training": 0, "steps": [[1, 10], [2, 20], [3, 30], [2, 40], [3, 50], [4, 60]]}
    assert page.evaluate("line => [25, 35, 45, 55].map((t) => stepsBy(line, t))", again) == [2, 1, 2, 3]


def test_smoothing_draws_the_mean_over_the_raw_curve(show: Open) -> None:
    page = show("one")
    scroll_through(page)
    readout = page.locator(".chart", has=page.get_by_role("heading", name="reward/score")).locator(".readout strong")
    expect(readout).to_have_text("1")
    page.locator("#smoothing").fill("0.5")
    # Weighted mean of k/6 with the weights 2^(k-6): (6 + 5/2 + 4/4 + 3/8 + 2/16 + 1/32) / 6 over (1 + 1/2 + ... +
    # 1/32).
    expect(readout).to_have_text("0.8492")


def test_two_runs_are_drawn_over_each_other_and_compared(show: Open) -> None:
    page = show("both")
    scroll_through(page)
    expect(page.locator("#changed td").first).to_have_text("train.learning_rate")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="reward/score"))
    expect(chart.locator(".readout .dot")).to_have_count(2)
    expect(page.locator(".lanes canvas")).to_have_count(2)


def test_keys_select_steps_prompts_rewards_and_colours(show: Open) -> None:
    page = show("one")
    step = page.locator("#rollouts output")
    prompt = page.locator("#rollouts select")
    expect(step).to_have_text("6")
    for key, text in (("k", "5"), ("k", "4"), ("j", "5")):
        page.keyboard.press(key)
        expect(step).to_have_text(text)
    before = prompt.input_value()
    page.keyboard.press("n")
    assert prompt.input_value() != before
    page.get_by_role("button", name="Reward 1: 3 responses").press("Enter")
    expect(page.locator(".response")).to_have_count(1)
    expect(page.locator(".response strong")).to_have_text("reward 1")
    page.keyboard.press("f")
    expect(page.locator(".response")).to_have_count(2)
    token = page.locator(".response").nth(1).locator(".bubble.own .tok").nth(1)
    seen = []
    for key in "123":
        page.keyboard.press(key)
        expect(page.locator("[role=radio][aria-checked=true]")).to_have_attribute("title", f"Key {key}")
        seen.append(token.evaluate("t => getComputedStyle(t).backgroundColor"))
    assert len(set(seen)) == 3, seen


def test_mouse_and_keys_show_the_numbers_of_a_token(show: Open) -> None:
    page = show("one")
    info = page.locator(".token-info")
    page.locator(".response .bubble.own .tok").nth(1).hover()
    expect(info).to_contain_text("log-probability −2.12")
    expect(info).to_contain_text("mismatch −0.12")
    response = page.locator(".response").first
    response.focus()
    page.keyboard.press("End")
    expect(info).to_contain_text("<eos>")
    page.keyboard.press("ArrowLeft")
    expect(info).to_contain_text("not learnt from")
    assert response.evaluate("a => getComputedStyle(a).outlineStyle") == "solid"


def test_turns_are_bubbles_below_the_common_prompt(show: Open) -> None:
    page = show("one")
    expect(page.locator("#rollouts .bubble.other .who").first).to_have_text("prompt")
    bubbles = page.locator(".response").first.locator(".bubble")
    assert bubbles.evaluate_all("all => all.map(b => b.classList[1])") == ["own", "other", "own"]


def test_the_timeline_zooms_by_steps_and_keys(show: Open) -> None:
    page = show("one")
    first = page.get_by_label("From step")
    last = page.get_by_label("To step")
    expect(last).to_have_value("6")
    first.fill("3")
    first.press("Enter")
    expect(first).to_have_value("3")
    page.locator(".lanes canvas").press("0")
    expect(first).to_have_value("1")
    expect(page.locator(".labels")).to_contain_text("ROLLOUT 1")


def test_hostile_text_is_shown_and_does_not_run(show: Open) -> None:
    page = show("evil", expected="violates the following Content Security Policy")
    page.get_by_text("What took the time").click()
    for key in "123kjnp":
        page.keyboard.press(key)
    scroll_through(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0
    assert EVIL.split("\u2028")[0] in page.locator("#rollouts .card").last.inner_text()
    assert EVIL.split("\u2028")[0] in page.locator(".alarm").inner_text()
    # The content security policy blocks scripts that were not escaped: only the page's own script may run.
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.hacked=1\" id=trap>x</b>')")
    page.evaluate("document.getElementById('trap').click()")
    assert page.evaluate("window.hacked") is None


def test_dark_mode_follows_the_system_and_a_key(show: Open) -> None:
    page = show("one", color_scheme="dark")
    back = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = back()
    page.keyboard.press("d")
    assert (dark, back()) == ("rgb(16, 19, 23)", "rgb(246, 247, 249)")
    page.emulate_media(color_scheme="light")
    # the attempt is visible
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("dark => getComputedStyle(document.body).backgroundColor === dark", arg=dark)


@pytest.mark.parametrize("name", ["one", "evil", "both", "supervised"])
def test_a_phone_does_not_scroll_sideways(name: str, show: Open) -> None:
    page = show(name, width=360)
    scroll_through(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_run_without_rollouts_shows_the_reason(show: Open) -> None:
    expect(show("supervised").locator("#rollouts")).to_contain_text("a supervised recipe writes none")


def test_help_lists_the_keys_and_closes(show: Open) -> None:
    page = show("one")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_contain_text("next, previous prompt")
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
