"""The page in a real browser: quiet, offline, alive, and readable on a phone and in the dark."""

import math
import re
import shutil
from collections.abc import Iterator

import pytest
from tests.report import samples

from rankwise.report import write_html
from rankwise.report.text import rank_share

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Browser, Locator, Page = sync_api.Browser, sync_api.Locator, sync_api.Page

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    installed = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as driver:
        try:
            running = driver.chromium.launch(executable_path=installed, args=QUIET)
        except sync_api.Error as error:
            pytest.skip(
                f"no Chromium starts, of {', '.join(NAMES)} or playwright's own: {error.message[:200]}"
            )
        yield running
        running.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    return {name: write_html(make(), folder / f"{name}.html").as_uri() for name, make in samples.ALL.items()}


class Visit:
    """A page with everything it complained about and asked for."""

    def __init__(self, browser: Browser, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        look = {"color_scheme": scheme, "reduced_motion": "reduce"}
        self.page: Page = browser.new_page(viewport={"width": width, "height": 844}, **look)
        self.page.set_default_timeout(10_000)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)

    def asked(self) -> list[str]:
        return [url for url in self.requests if not url.startswith("data:")]


@pytest.fixture
def encoder(browser: Browser, reports: dict[str, str]) -> Iterator[Page]:
    visit = Visit(browser, reports["encoder"])
    yield visit.page
    visit.page.close()
    assert visit.complaints == []


def hovered(page: Page) -> str:
    label = page.locator(".hoverlayer .hovertext").first
    label.wait_for(timeout=5_000)
    return " ".join(label.all_text_contents())


def outline(page: Page) -> dict[str, float]:
    shapes = page.locator(".heat .shapelayer path")
    assert shapes.count() == 1
    box = shapes.bounding_box()
    assert box is not None
    return box


def settle(page: Page) -> None:
    """Wait until the page lies still: what follows a click is drawn and scrolled to after it."""
    page.wait_for_function(
        "() => new Promise((done) => { const y = scrollY; setTimeout(() => done(y === scrollY), 250); })"
    )


@pytest.mark.parametrize("name", samples.ALL)
def test_every_sample_opens_without_a_complaint_or_a_request(
    browser: Browser, reports: dict[str, str], name: str
) -> None:
    visit = Visit(browser, reports[name])
    assert visit.complaints == []
    assert visit.asked() == [reports[name]]
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", samples.ALL)
def test_a_phone_needs_no_sideways_scrolling(
    browser: Browser, reports: dict[str, str], name: str, scheme: str
) -> None:
    visit = Visit(browser, reports[name], width=390, scheme=scheme)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.complaints == []
    visit.page.close()


def test_there_is_a_picture_in_every_plot(encoder: Page) -> None:
    assert encoder.locator(".heat .hm image, .heat .hm path").count() >= 1
    assert encoder.locator(".depth .plot").count() == 3
    for number in range(3):
        assert encoder.locator(".depth .plot").nth(number).locator(".scatterlayer .trace .point").count() == 7
    assert encoder.locator("#spectra-plot .scatterlayer .trace .js-line").count() == 3


def test_each_panel_of_an_encoder_decoder_has_its_own_map_and_null(
    browser: Browser, reports: dict[str, str]
) -> None:
    page = Visit(browser, reports["encoder_decoder"]).page
    assert page.locator(".heat").count() == 3
    assert page.locator(".null-name").all_inner_texts() == ["null 0.63", "null 0.51", "null 0.64"]
    page.close()


def test_the_null_stands_at_its_place_on_the_scale(encoder: Page) -> None:
    ramp, mark = (encoder.locator(name).bounding_box() for name in (".ramp", ".null-mark"))
    share = (mark["x"] + mark["width"] / 2 - ramp["x"]) / ramp["width"]
    # The scale runs from 0 to 1 inside its border; the mark may be off by its own 2 pixels.
    assert share == pytest.approx(1 - (1 - 1 / 128) ** 128, abs=3 / ramp["width"])


def test_a_finding_leads_to_its_cell(encoder: Page) -> None:
    encoder.locator("a", has_text="encoder.layer layer 2 head 7").first.click()
    settle(encoder)
    box = outline(encoder)
    assert 0 <= box["y"] <= 844 - box["height"]
    assert encoder.input_value("#measure") == "peak_mass"
    assert (
        encoder.locator(".panel .status").first.inner_text().startswith("layer 2, head 7: peak mass 0.93 · ")
    )
    encoder.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "layer 2, head 7" in hovered(encoder)


def test_the_cell_of_a_tall_map_is_brought_into_view(browser: Browser, reports: dict[str, str]) -> None:
    audit = samples.sized(48, 32)
    last = max(range(len(audit.findings)), key=lambda index: audit.findings[index].where.layer)
    page = Visit(browser, reports["large"]).page
    page.locator(".more summary").click()
    page.locator(f"[data-finding='{last}']").click()
    settle(page)
    box = outline(page)
    assert 0 <= box["y"] <= 844 - box["height"]
    page.close()


def test_twins_share_an_outline(encoder: Page) -> None:
    encoder.locator("a", has_text="encoder.layer layer 3 head 4").click()
    settle(encoder)
    box = outline(encoder)
    found = []
    for share in (0.25, 0.75):
        encoder.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        encoder.wait_for_timeout(200)
        found.append(re.search(r"layer \d+, head \d+", hovered(encoder)).group())
    assert found == ["layer 3, head 4", "layer 3, head 5"]


def test_a_finding_on_states_marks_the_curves(encoder: Page) -> None:
    encoder.locator("a", has_text="encoder.layer layer 6").click()
    settle(encoder)
    assert encoder.locator(".depth .shapelayer path").count() == 3
    assert encoder.locator("#depth-status").inner_text() == "Marked: encoder.layer, after block 6."
    marks = encoder.locator(".depth .plot").first.locator(".scatterlayer .trace .point")
    last, line = marks.nth(6).bounding_box(), encoder.locator(".depth .shapelayer path").first.bounding_box()
    assert line["x"] + line["width"] / 2 == pytest.approx(last["x"] + last["width"] / 2, abs=2)


def test_the_keyboard_goes_from_a_finding_through_the_map_to_a_spectrum(encoder: Page) -> None:
    encoder.locator("a", has_text="encoder.layer layer 4 head 3").focus()
    encoder.keyboard.press("Enter")
    settle(encoder)
    assert encoder.evaluate("document.activeElement.classList.contains('heat')")
    for key in ("ArrowRight", "ArrowUp"):
        encoder.keyboard.press(key)
    assert encoder.locator(".panel .status").first.inner_text().startswith("layer 3, head 4: row distance")
    encoder.keyboard.press("Enter")
    assert "layer 3, head 4" in " ".join(encoder.locator(".chip").all_inner_texts())
    assert outline(encoder)["width"] > 20


def test_the_way_back_from_a_cell_is_the_browsers(encoder: Page) -> None:
    link = encoder.locator("a", has_text="encoder.layer layer 2 head 7").first
    link.click()
    settle(encoder)
    encoder.go_back()
    settle(encoder)
    assert 0 <= link.bounding_box()["y"] <= 844


def test_clicking_a_cell_draws_its_spectrum(encoder: Page) -> None:
    encoder.locator("a", has_text="encoder.layer layer 2 head 7").first.click()
    settle(encoder)
    box = outline(encoder)
    encoder.mouse.click(box["x"] + 1.5 * box["width"], box["y"] + 0.5 * box["height"])
    encoder.wait_for_selector(".chip >> text=layer 2, head 8")
    assert encoder.locator(".heat").get_attribute("data-marked") == str(2 * 12 + 8)


def test_spectra_come_and_go_and_the_oldest_makes_room(encoder: Page) -> None:
    for index in (0, 1, 2, 3):
        encoder.select_option("#head", str(index))
    names = encoder.locator(".chip").all_inner_texts()
    assert len(names) == 6
    assert {f"layer 0, head {head}" for head in range(4)} <= set(names)
    encoder.locator(".chip", has_text="layer 0, head 2").click()
    assert encoder.locator(".chip").count() == 5
    assert encoder.locator("#spectra-plot .scatterlayer .trace .js-line").count() == 5


def test_choosing_a_measure_changes_colours_words_and_scale(encoder: Page) -> None:
    before = encoder.locator(".heat .hm image").get_attribute("href")
    encoder.select_option("#measure", "sink_mass")
    assert encoder.locator(".heat .hm image").get_attribute("href") != before
    assert encoder.locator("[data-meaning]:visible").inner_text().startswith("The mean share of a row")
    assert not encoder.locator(".null-mark").is_visible()
    assert encoder.locator(".ends .high").inner_text() == "1.00 all of it"


def test_a_number_that_is_not_there_is_a_dash_in_its_cell(encoder: Page) -> None:
    texts = encoder.locator(".heat .textpoint text").all_text_contents()
    assert texts.count("–") == 1
    assert len(texts) == 72


def test_the_table_sorts_both_ways_with_missing_numbers_last(encoder: Page) -> None:
    shares = [rank_share(head) for head in samples.encoder().heads]
    finite = sorted(share for share in shares if math.isfinite(share))
    column = encoder.locator("#head-table tbody tr td:nth-child(5)")
    for expected in (finite, finite[::-1]):
        encoder.get_by_role("button", name="Rank share").click()
        assert column.all_inner_texts() == [*(f"{share:.2f}" for share in expected), "–"]
    assert encoder.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"


def test_a_head_of_the_table_leads_to_its_cell_even_when_sorted(encoder: Page) -> None:
    encoder.get_by_role("button", name="Sink mass").click()
    encoder.locator("#head-table tbody a").last.click()
    settle(encoder)
    most = max(range(72), key=lambda index: samples.encoder().heads[index].sink_mass)
    assert encoder.locator(".heat").get_attribute("data-marked") == str(most)


def tick_colour(page: Page) -> str:
    return page.locator(".heat .xtick text").first.evaluate("(text) => getComputedStyle(text).fill")


def looks(page: Page) -> list[str]:
    """The colours of the page, of an axis and of a heat map."""
    read = "() => getComputedStyle(document.body).backgroundColor"
    return [page.evaluate(read), tick_colour(page), page.locator(".heat .hm image").get_attribute("href")]


def test_the_plots_follow_the_lights(encoder: Page) -> None:
    light = looks(encoder)
    encoder.emulate_media(color_scheme="dark")
    fill = "getComputedStyle(document.querySelector('.heat .xtick text')).fill"
    encoder.wait_for_function(f"(old) => {fill} !== old", arg=light[1])
    dark = looks(encoder)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert dark[0] == "rgb(18, 22, 28)"


def test_what_would_escape_stays_text(browser: Browser, reports: dict[str, str]) -> None:
    visit = Visit(browser, reports["nasty"])
    page = visit.page
    page.locator("[data-finding='0']").click()
    settle(page)
    box = outline(page)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "layer 1, head 2" in hovered(page)
    assert samples.NASTY in page.locator(".panel .status").nth(1).inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("h1").inner_text() == samples.NASTY
    assert visit.complaints == []
    assert visit.asked() == [reports["nasty"]]
    page.close()


def test_the_policy_stops_a_script_that_got_in_after_all(browser: Browser, reports: dict[str, str]) -> None:
    visit = Visit(browser, reports["no_layers"])
    visit.page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.got = 1\">')"
    )
    visit.page.wait_for_timeout(200)
    assert visit.page.evaluate("window.got") is None
    assert any("Content Security Policy" in complaint for complaint in visit.complaints)
    visit.page.close()


def test_memberships_are_drawn_for_the_layer_chosen(browser: Browser, reports: dict[str, str]) -> None:
    visit = Visit(browser, reports["memberships"])
    page = visit.page
    settle(page)
    plots = page.locator(".plot.membership")
    assert plots.count() == 2
    read = "(at) => document.querySelectorAll('.plot.membership')[at].data[0].z[0][0]"
    before = [page.evaluate(read, at) for at in range(2)]
    page.locator("#membership-1").select_option("2")
    page.wait_for_function(f"(old) => ({read})(1) !== old", arg=before[1])
    assert page.evaluate(read, 0) == before[0]
    assert visit.complaints == []
    page.close()
