"""Pages in a browser: interaction, screens and phones, light and dark, without console messages."""

import csv
import io
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support import documents, records
from tests.support.documents import RANK, audit_document

from rankwise.auditing import AttentionMap, Audit, History
from rankwise.auditing.attention_maps import block_averages
from rankwise.operators import DenseMixing
from rankwise.report import write_page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Browser, Locator, Page = sync_api.Browser, sync_api.Locator, sync_api.Page

pytestmark = pytest.mark.browser

KINDS = [kind for kind in documents.DOCUMENTS if kind != "audit"]  # that page is in `records.ALL`
PATIENCE = 60_000
"""Milliseconds that a condition may take on a busy machine."""
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


def pictured() -> Audit:
    """The encoder with two attention maps: a sink of 300 tokens, and 9 tokens with names."""
    audit = records.encoder()
    long = torch.full((300, 300), 0.001)
    long[:, 8] = 0.7
    small = torch.eye(9) * 0.5
    pictures = {
        31: AttentionMap.of(block_averages(DenseMixing(long)).numpy(), 300, 300),
        32: AttentionMap.of(small.numpy(), 9, 9, "input_ids", "input_ids"),
    }
    heads = [h.model_copy(update={"attention_map": pictures.get(at)}) for at, h in enumerate(audit.heads)]
    texts = {"input_ids": [f"<{letter}>" for letter in ["=a", *"bcdefghi"]]}
    return audit.model_copy(update={"heads": heads, "texts": texts})


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    audits = {name: audit_document(make()) for name, make in (records.ALL | {"pictured": pictured}).items()}
    kinds = {f"{name} page": documents.DOCUMENTS[name]() for name in KINDS}
    return {
        name: write_page(document, folder / f"{name}.html").as_uri()
        for name, document in (audits | kinds).items()
    }


class Visit:
    """A page with its console messages and requests."""

    def __init__(self, browser: Browser, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        look = {"color_scheme": scheme, "reduced_motion": "reduce"}
        self.page: Page = browser.new_page(viewport={"width": width, "height": 844}, **look)
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]")

    def asked(self) -> list[str]:
        return [url for url in self.requests if not url.startswith("data:")]


@pytest.fixture
def encoder(browser: Browser, reports: dict[str, str]) -> Iterator[Page]:
    visit = Visit(browser, reports["pictured"])
    yield visit.page
    visit.page.close()
    assert visit.complaints == []


def outline(page: Page) -> dict[str, float]:
    shapes = page.locator(".heat .shapelayer path")
    assert shapes.count() == 1
    box = shapes.bounding_box()
    assert box is not None
    return box


def opened(page: Page, head: int) -> Locator:
    """The card of a head, once it is open and its matrix is drawn."""
    page.wait_for_selector(f"#head-card[data-head='{head}']", state="visible")
    return page.locator("#head-card")


# `wait_for_function` is given functions: a bare expression is evaluated anew at each look, which the page's
# own policy forbids unless the first look finds it true.


def settle(page: Page) -> None:
    """Wait until drawing and scrolling after a click have ended."""
    page.wait_for_function(
        "() => new Promise((done) => { const y = scrollY; setTimeout(() => done(y === scrollY), 250); })"
    )


CUT_OFF = """() => [...document.querySelectorAll('.plot .main-svg')].flatMap((plot) => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('text')].filter((text) => {
    const { width, left, right, top, bottom } = text.getBoundingClientRect();
    const outside = [box.left - left, right - box.right, box.top - top, bottom - box.bottom];
    return width && Math.max(...outside) > 1;
  }).map((text) => text.textContent);
})"""
"""Labels of figures that are not completely inside the figure."""
CLIPPED = """[...document.querySelectorAll(".static")].map((table) => table.scrollWidth - table.clientWidth)
  .filter((hidden) => 0 < hidden && hidden < 24)"""
"""Pixels of tables that are hidden, if so few that nobody scrolls to see them."""


@pytest.mark.parametrize("name", [*records.ALL, *(f"{kind} page" for kind in KINDS)])
def test_every_page_fits_phones_and_screens_without_console_messages(
    browser: Browser, reports: dict[str, str], name: str
) -> None:
    visit = Visit(browser, reports[name], width=390, scheme="dark")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.page.evaluate(CUT_OFF) == visit.page.evaluate(CLIPPED) == []
    visit.page.set_viewport_size({"width": 1400, "height": 900})
    visit.page.emulate_media(color_scheme="light")
    settle(visit.page)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1400
    assert visit.page.evaluate(CUT_OFF) == []
    assert visit.complaints == []
    assert visit.asked() == [reports[name]]
    visit.page.close()


def test_the_page_before_a_click_and_with_an_open_card(encoder: Page) -> None:
    assert encoder.get_by_role("heading", name="What to do").count() == 1
    assert encoder.get_by_role("list", name="What to do").locator("li").count() == 2
    assert encoder.locator(".heat .hm image, .heat .hm path").count() >= 1
    texts = encoder.locator(".heat .textpoint text").all_text_contents()
    assert (len(texts), texts.count("–")) == (72, 1)  # a missing number is a dash in its cell
    curves = encoder.locator("#states .plot")
    points = [curves.nth(number).locator(".scatterlayer .trace .point").count() for number in range(3)]
    assert points == [7, 7, 7]
    ramp, mark = (encoder.locator(name).bounding_box() for name in (".ramp", ".reference"))
    share = (mark["x"] + mark["width"] / 2 - ramp["x"]) / ramp["width"]
    # The scale runs from 0 to 1 inside its border; the mark may be off by its own 2 pixels.
    assert share == pytest.approx(1 - (1 - 1 / 128) ** 128, abs=3 / ramp["width"])
    assert encoder.locator("#legend").inner_text().startswith("① one-hot rows 0.63: ")
    card = opened(encoder, 31)  # a finding and a matrix
    assert card.locator("#spectra-plot .scatterlayer .trace .js-line").count() == 1
    (ring,) = encoder.evaluate(
        "document.querySelector('#spectra-plot').data.filter((t) => t.meta.ring !== undefined)"
    )
    assert ring["x"][0] == pytest.approx(RANK.value(records.encoder().heads[31]), rel=1e-5)
    encoder.wait_for_selector("#matrix-plot .hm image")
    said = card.locator("#matrix-note").inner_text()
    assert "300 × 300 tokens" in said
    assert "means over blocks: 128 × 128" in said


def test_findings_lead_to_their_cells_and_mark_all_their_heads_and_curves(encoder: Page) -> None:
    link = encoder.locator("a", has_text="encoder.layer layer 2 head 7").first
    link.click()
    card = opened(encoder, 31)
    settle(encoder)
    box = outline(encoder)
    assert 0 <= box["y"] <= 844 - box["height"]
    assert encoder.input_value("#measure") == "max_token_mass"
    assert card.locator("#head-name").inner_text() == "layer 2, head 7"
    assert card.locator("#head-findings").inner_text().startswith("SINK")
    assert card.locator(".chosen").inner_text().split()[:4] == ["Largest", "token", "mass", "0.93"]
    assert 0 <= card.bounding_box()["y"] <= 844 - 200
    encoder.go_back()
    settle(encoder)
    assert 0 <= link.bounding_box()["y"] <= 844
    # an open head lists its own findings, without sentences on other heads
    encoder.locator("a", has_text="encoder.layer layer 0 head 1").click()
    listed = opened(encoder, 1).locator("#head-findings li").all_inner_texts()
    assert listed == ["OVERSIZED_HEADS of encoder.layer layer 0", "IDENTITY Every token keeps to itself."]
    encoder.locator("a", has_text="encoder.layer layer 3 heads 4, 5").click()
    opened(encoder, 40)
    encoder.wait_for_selector(".heat[data-marked='40 41']")
    assert outline(encoder)["width"] > 1.8 * outline(encoder)["height"]
    assert encoder.input_value("#measure") == "nearest_head_distance"
    encoder.locator("[data-finding='5']").click()  # OVERSIZED_HEADS
    encoder.wait_for_selector(f".heat[data-marked='{' '.join(map(str, range(12)))}']")
    encoder.locator("[data-finding='0']").click()
    settle(encoder)
    assert encoder.locator("#states .shapelayer path").count() == 3
    assert encoder.locator("#states-status").inner_text() == "Marked: encoder.layer, after 6 blocks."
    marks = encoder.locator("#states .plot").first.locator(".scatterlayer .trace .point")
    last, line = marks.nth(6).bounding_box(), encoder.locator("#states .shapelayer path").first.bounding_box()
    assert line["x"] + line["width"] / 2 == pytest.approx(last["x"] + last["width"] / 2, abs=2)


def test_keyboard_and_clicks_go_through_the_map(encoder: Page) -> None:
    encoder.locator("a", has_text="encoder.layer layer 4 head 3").focus()
    encoder.keyboard.press("Enter")
    opened(encoder, 51)
    settle(encoder)
    assert encoder.evaluate("document.activeElement.classList.contains('heat')")
    for key, head in (("ArrowRight", 52), ("ArrowUp", 40)):
        encoder.keyboard.press(key)
        opened(encoder, head)
    encoder.keyboard.press("Enter")
    assert encoder.locator(".chip").all_inner_texts() == ["layer 3, head 4"]  # its spectrum is kept
    encoder.locator("a", has_text="encoder.layer layer 2 head 7").first.click()
    settle(encoder)
    box = outline(encoder)
    encoder.mouse.click(box["x"] + 1.5 * box["width"], box["y"] + 0.5 * box["height"])
    card = opened(encoder, 32)
    encoder.wait_for_function("() => document.querySelector('#matrix-plot').data?.[0].z.length === 9")
    drawn = encoder.evaluate("document.querySelector('#matrix-plot').data[0]")
    assert "row &lt;=a> (0)<br>column &lt;=a> (0)<br><b>≈ 0.5" in drawn["hovertext"][0][0]
    assert card.locator("#matrix-plot .ytick text").first.text_content() == "<=a>"
    assert "9 × 9 tokens" in card.locator("#matrix-note").inner_text()


def test_on_a_phone_a_head_is_a_sheet_below_its_map(browser: Browser, reports: dict[str, str]) -> None:
    visit = Visit(browser, reports["pictured"], width=390)
    page = visit.page
    card = page.locator("#head-card")
    assert not card.is_visible()
    drag = page.locator(".heat .nsewdrag").bounding_box()
    page.mouse.click(0, 0)
    page.locator(".heat .nsewdrag").click(position={"x": drag["width"] * 0.5, "y": drag["height"] * 0.5})
    card.wait_for(state="visible")
    settle(page)
    box, cell = card.bounding_box(), outline(page)
    assert box["y"] + box["height"] == pytest.approx(844, abs=1)
    assert 0 <= cell["y"] < cell["y"] + cell["height"] <= box["y"]
    page.locator("#close-head").click()
    assert not card.is_visible()
    assert visit.complaints == []
    page.close()


def test_choosing_a_measure_redraws_the_map_which_is_saved_as_png(
    encoder: Page,
) -> None:
    before = encoder.locator(".heat .hm image").get_attribute("href")
    encoder.select_option("#measure", "first_token_mass")
    assert encoder.locator(".heat .hm image").get_attribute("href") != before
    assert encoder.locator("[data-meaning]:visible").inner_text().startswith("Share of the weight of a row")
    assert encoder.locator(".reference").count() == 0
    assert encoder.locator(".ends .high").inner_text() == "1.00 all of it"
    image = saved(encoder, encoder.get_by_role("button", name="PNG").first)
    assert image.startswith(b"\x89PNG")
    assert len(image) > 5_000


def test_cells_of_a_diagonal_are_hatched_if_a_measure_is_not_informative(
    browser: Browser, reports: dict[str, str]
) -> None:
    page = Visit(browser, reports["memberships"]).page
    assert page.input_value("#measure") == "effective_rank"  # the first that says something of them
    assert "╱╱╱" not in page.locator(".heat .textpoint text").all_text_contents()
    page.select_option("#measure", "numerical_rank")
    page.wait_for_function("() => document.querySelector('.heat .textpoint text').textContent === '╱╱╱'")
    assert set(page.locator(".heat .textpoint text").all_text_contents()) == {"╱╱╱"}
    page.close()


def test_the_table_sorts_both_ways_with_missing_numbers_last(encoder: Page) -> None:
    shares = [RANK.value(head) for head in records.encoder().heads]
    finite = sorted(share for share in shares if math.isfinite(share))
    place = encoder.locator("#head-table thead th").all_inner_texts().index("Rank share") + 1
    column = encoder.locator(f"#head-table tbody tr > :nth-child({place})")
    for expected in (finite, finite[::-1]):
        encoder.get_by_role("button", name="Rank share").click()
        assert column.all_inner_texts() == [*(f"{share:.2f}" for share in expected), "–"]
    assert encoder.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    encoder.locator("#head-table tbody a").first.click()
    most = max(range(72), key=lambda index: shares[index] if math.isfinite(shares[index]) else -1)
    opened(encoder, most)


def test_a_long_table_is_shown_in_part_at_first(browser: Browser, reports: dict[str, str]) -> None:
    page = Visit(browser, reports["large"]).page
    assert page.locator("#head-table tbody tr").count() == 200
    page.get_by_role("button", name="Show all 384 rows").click()
    assert page.locator("#head-table tbody tr").count() == 384
    page.close()


def saved(page: Page, click: Locator) -> bytes:
    with page.expect_download() as found:
        click.click()
    return Path(found.value.path()).read_bytes()


def test_tables_are_saved_as_csv_that_runs_nothing_and_keeps_its_numbers(
    browser: Browser, reports: dict[str, str], tmp_path: Path
) -> None:
    audit = records.encoder()
    heads = [head.model_copy(update={"site": '=1+1,"x"'}) for head in audit.heads]
    heads[0] = heads[0].model_copy(update={"sigma_max": 1e-7, "kind": "-x", "identity_distance": -0.25})
    address = write_page(
        audit_document(audit.model_copy(update={"heads": heads, "findings": []})), tmp_path
    ).as_uri()
    page = Visit(browser, address).page
    text = saved(page, page.get_by_role("button", name="Download CSV").first).decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 72
    assert (rows[0]["site"], rows[0]["kind"]) == ('\'=1+1,"x"', "'-x")
    assert (float(rows[0]["sigma_max"]), rows[0]["identity_distance"]) == (1e-7, "-0.25")
    assert [row["numerical_rank_share"] for row in rows].count("") == 1
    assert float(rows[5]["first_token_mass_std"]) == pytest.approx(heads[5].std["first_token_mass"], rel=1e-5)
    page.close()


def test_plots_follow_light_and_dark_mode(encoder: Page) -> None:
    def looks() -> list[str]:
        read = "() => getComputedStyle(document.body).backgroundColor"
        tick = encoder.locator(".heat .xtick text").first.evaluate("(text) => getComputedStyle(text).fill")
        return [encoder.evaluate(read), tick, encoder.locator(".heat .hm image").get_attribute("href")]

    light = looks()
    encoder.emulate_media(color_scheme="dark")
    fill = "getComputedStyle(document.querySelector('.heat .xtick text')).fill"
    encoder.wait_for_function(f"(old) => {fill} !== old", arg=light[1])
    assert all(one != other for one, other in zip(light, looks(), strict=True))


def test_names_with_markup_stay_text(browser: Browser, reports: dict[str, str]) -> None:
    visit = Visit(browser, reports["nasty"])
    page = visit.page
    page.locator("[data-finding='0']").click()
    card = opened(page, 5)
    assert records.NASTY in card.locator("#head-facts").inner_text()
    assert records.NASTY in card.locator("#head-findings").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("h1").inner_text() == records.NASTY
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.got = 1\">')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.got") is None
    assert all("Content Security Policy" in complaint for complaint in visit.complaints)
    assert visit.complaints
    page.close()


def test_memberships_are_drawn_for_the_layer_chosen(browser: Browser, reports: dict[str, str]) -> None:
    visit = Visit(browser, reports["memberships"])
    page = visit.page
    settle(page)
    visible = page.locator("#memberships figure:visible .plot")
    assert visible.count() == 2  # one per grid
    read = "() => document.querySelector('#memberships figure:not([hidden]) .plot').data[0].z[0][0]"
    before = page.evaluate(read)
    page.select_option("#choose-memberships", "layer 2")
    page.wait_for_function(f"(old) => ({read})() !== old", arg=before)
    assert visible.count() == 2
    assert visit.complaints == []
    page.close()


@pytest.mark.parametrize("width", [1400, 390])
def test_the_curves_of_a_history_fit_their_boxes_and_follow_the_choice(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    history = History([(step, records.encoder()) for step in (0, 500, 1000)])
    visit = Visit(browser, history.to_html(tmp_path / "history.html").as_uri(), width)
    page = visit.page
    drawn = page.eval_on_selector_all(
        "figure:not([hidden]) .plot",
        "boxes => boxes.map(box => [box.clientWidth, box.querySelector('.main-svg').clientWidth])",
    )
    assert len(drawn) == 4
    assert all(svg <= box for box, svg in drawn)
    page.select_option("#choose-heads", label="First-token mass")
    page.wait_for_selector("#heads figure[data-title='First-token mass'] .main-svg")
    assert page.locator("#heads figure:visible").count() == 1
    assert page.locator("#heads .main-svg:visible").count() >= 1
    assert visit.complaints == []
    page.close()
