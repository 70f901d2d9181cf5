"""The report in a real browser: headless Chromium of Debian's packages `chromium` and `chromium-driver`."""

import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.run_folders import HOSTILE_CAPTIONS, write_run
from ttv_train.report import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
)


VIDEOS = "[...document.querySelectorAll('video')]"
RECORD_PROBLEMS = """
window.problems = [];
for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
  window.addEventListener(kind, (event) => problems.push(`${kind}: ${event.message ?? event.blockedURI}`), true);
"""
INJECT = """document.body.insertAdjacentHTML("beforeend", `<img src="x" onerror="document.title = 'injected'">`)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    # What goes wrong is recorded from before the page's own script runs.
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORD_PROBLEMS})
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "demo", steps=40, validate_every=20))


@pytest.fixture
def page(browser, report):
    browser.get(report.as_uri())
    return browser


def wait(page, script):
    """Until a JavaScript expression is true."""
    WebDriverWait(page, 30, poll_frequency=0.05).until(lambda page: page.execute_script(f"return {script}"), script)


def scroll_to(page, element):
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)


def test_videos_play(page):
    count = len(page.find_elements(By.TAG_NAME, "video"))
    assert count == 2 * 4 + 2 * 2
    wait(page, f"{VIDEOS}.every((video) => video.readyState >= 2)")
    shapes = page.execute_script(
        f"return {VIDEOS}.map((video) => [video.videoWidth, video.videoHeight, video.duration])"
    )
    assert shapes == count * [[160, 96, pytest.approx(8 / 12, abs=0.01)]]

    # They play by themselves while they are on the screen.
    for video in page.find_elements(By.TAG_NAME, "video"):
        scroll_to(page, video)
        page.execute_script("window.video = arguments[0]; window.times = new Set()", video)
        wait(page, "times.add(video.currentTime) && !video.paused && times.size > 2")


def test_the_button_pauses_and_resumes(page):
    button = page.find_element(By.ID, "toggle-videos")
    scroll_to(page, page.find_element(By.TAG_NAME, "video"))
    wait(page, f"{VIDEOS}.some((video) => !video.paused)")
    button.click()
    wait(page, f"{VIDEOS}.every((video) => video.paused)")
    assert button.text == "Play all"
    button.click()
    wait(page, f"{VIDEOS}.some((video) => !video.paused)")
    assert button.text == "Pause all"


def test_nothing_fails_and_nothing_is_fetched(page):
    page.get_log("performance")
    page.get_log("browser")
    page.refresh()
    wait(page, f"{VIDEOS}.every((video) => video.readyState >= 2)")
    assert page.execute_script("return problems") == []
    assert [entry for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert not [entry for entry in page.get_log("performance") if '"url":"http' in entry["message"]]


def test_injected_markup_is_shown_and_not_run(page):
    wait(page, f"{VIDEOS}.every((video) => video.readyState >= 2)")
    assert page.title == "demo · ttv-train report"
    shown = [quote.text for quote in page.find_elements(By.TAG_NAME, "blockquote")]
    assert shown == HOSTILE_CAPTIONS
    assert page.find_elements(By.CSS_SELECTOR, "img, [onerror], [onload], blockquote *") == []
    assert len(page.find_elements(By.TAG_NAME, "script")) == 1


def test_the_page_forbids_scripts_that_are_not_its_own(page):
    """Even markup that got past the escaping could not do anything."""
    page.execute_script(INJECT)
    wait(page, "problems.length > 0")
    assert page.title == "demo · ttv-train report"
    page.get_log("browser")


def test_charts_tell_the_values_under_the_pointer(page):
    plot = page.find_element(By.CSS_SELECTOR, "#loss .plot")
    scroll_to(page, plot)
    webdriver.ActionChains(page).move_to_element(plot).perform()
    tip = plot.find_element(By.CSS_SELECTOR, ".tip")
    assert tip.is_displayed()
    lines = tip.text.split("\n")
    assert lines[0] == "step 20"
    assert lines[1].startswith("training, smoothed: 0.")
    assert lines[2].startswith("validation: 0.")


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_the_page_is_never_wider_than_the_screen(page, width):
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_colours_follow_the_system(page):
    colours = {}
    for scheme in ("light", "dark"):
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        colours[scheme] = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert colours == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 18, 22)"}
