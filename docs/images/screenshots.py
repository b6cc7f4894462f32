"""Take the screenshots of an audit's page again: light next to dark, on a wide screen and on a phone.

Needs the packages playwright and pillow, a Chromium on the path, and a folder written by
`rankwise audit MODEL --text TEXT --attention-maps all --importance exact --at-init`:

    python docs/images/screenshots.py rankwise-audit/index.html --layer 2 --head 7

writes report.webp and report-phone.webp next to this file. Look at them before you commit them.
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
SCREENS = {"report.webp": (1280, 1000, 1.0), "report-phone.webp": (390, 844, 2.0)}
"""File name → width and height in CSS pixels, and device pixels per CSS pixel."""


def screenshot(
    browser: Browser, page: str, layer: int, head: int, scheme: str, screen: tuple[int, int, float]
) -> Image.Image:
    """Return the page with a head open."""
    width, height, scale = screen
    tab = browser.new_page(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    tab.goto(page)
    tab.wait_for_selector("html[data-ready]")
    plot = tab.locator(".heat").first
    layers, heads = plot.evaluate("plot => [plot.data[0].z.length, plot.data[0].z[0].length]")
    plot.scroll_into_view_if_needed()
    cells = plot.locator(".nsewdrag").bounding_box()
    assert cells is not None
    x = cells["x"] + (head + 0.5) * cells["width"] / heads
    y = cells["y"] + (layer + 0.5) * cells["height"] / layers
    tab.mouse.click(x, y)
    tab.wait_for_selector("#head-card", state="visible")
    top = "#heads" if width > height else ".heat"  # a phone has no room for the words above the map
    tab.locator(top).first.evaluate("element => element.scrollIntoView()")
    tab.wait_for_timeout(2000)
    return Image.open(io.BytesIO(tab.screenshot()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--layer", type=int, default=0, help="layer of the head to open, in the first map")
    parser.add_argument("--head", type=int, default=0, help="head of that layer")
    given = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, screen in SCREENS.items():
            shots = [
                screenshot(browser, given.page.resolve().as_uri(), given.layer, given.head, scheme, screen)
                for scheme in ("light", "dark")
            ]
            both = Image.new("RGB", (sum(shot.width for shot in shots), shots[0].height))
            for at, shot in enumerate(shots):
                both.paste(shot, (at * shot.width, 0))
            both.save(HERE / name, quality=80, method=6)


if __name__ == "__main__":
    main()
