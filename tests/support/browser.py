"""A real browser for tests: Debian's chromium, driven over WebDriver, with an empty profile and no internet access."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from support.node_process import PASSWORD, USER, NodeProcess

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT_S = 20.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESKTOP, PHONE = (1440, 900), (375, 812)


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, css: str) -> WebElement:
        """Return the first element that matches, as soon as there is one."""
        found: WebElement = self.until(lambda: next(iter(self.all(css)), None), f"there is no {css}")
        return found

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def until(self, look: Callable[[], Any], problem: str) -> Any:
        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.1).until(lambda _: look(), problem)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Send keys to the focused element."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(path))

    def console(self) -> list[str]:
        """Return the page's errors and warnings since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def forget(self) -> None:
        """Reset the browser: nothing open, stored, emulated or logged."""
        url = urlsplit(self.driver.current_url)
        everything = {"origin": f"{url.scheme}://{url.netloc}", "storageTypes": "all"}
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", everything)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        self.resize(DESKTOP)
        self.console()
        self.hosts_asked()

    def hosts_asked(self) -> set[str]:
        """Return the hosts that the browser has sent requests to, for any page, since the last call."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        asked = (one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent")
        return {urlsplit(url).netloc for url in asked if urlsplit(url).scheme not in ("data", "chrome")}


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    assert DRIVER is not None
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        browser = Browser(driver)
        browser.resize(DESKTOP)
        yield browser
    finally:
        driver.quit()


# What several tests do with the page: log in, and check its accessibility.


ROOT = Path(__file__).parents[2]


def log_in(browser: Browser, node: NodeProcess, password: str = PASSWORD) -> None:
    browser.open(f"{node.http_url}/ui/")
    browser.find("#user").send_keys(USER)
    browser.find("#password").send_keys(password)
    browser.find("button[type=submit]").click()


def show_map(browser: Browser) -> None:
    """Make the overview show every vbucket."""
    browser.find("#show-map")

    def is_open() -> bool:
        # Elements below the health line move when it grows, so a click may miss.
        for button in browser.all("#show-map[aria-expanded=false]"):
            button.click()
        return bool(browser.all(".full-map"))

    browser.until(is_open, "the map does not open")


def axe_findings(browser: Browser) -> list[Any]:
    """Return the serious faults that axe finds."""
    browser.run(_axe_source())
    found = browser.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    return [
        (one["id"], one["impact"], [node["html"][:120] for node in one["nodes"][:3]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def _axe_source() -> str:
    newest = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
    return newest.read_text() if newest.exists() else files("axe_core_python").joinpath("axe.min.js").read_text()
