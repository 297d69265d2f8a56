"""What several tests do with the page: log in, and have its accessibility checked."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from support.browser import Browser
from support.node_process import PASSWORD, USER, NodeProcess

ROOT = Path(__file__).parents[2]


def log_in(browser: Browser, node: NodeProcess, password: str = PASSWORD) -> None:
    browser.open(f"{node.http_url}/ui/")
    browser.find("#user").send_keys(USER)
    browser.find("#password").send_keys(password)
    browser.find("button[type=submit]").click()


def axe_findings(browser: Browser) -> list[Any]:
    """The serious faults that axe finds."""
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
