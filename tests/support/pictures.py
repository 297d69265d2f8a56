"""Takes the pictures for the documentation: the dashboard of a real cluster of two nodes after a failover, and the
page of a running landing.

    scripts/take-pictures                   into docs/images
    scripts/take-pictures FOLDER --all      every page, wide and narrow, light and dark, for people to look at
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from headwater.client.cluster_map import vbucket_of
from headwater.errors import HeadwaterError
from headwater.protocol.messages.documents import Set
from support.browser import Browser, log_in, running_browser
from support.node_process import PASSWORD, USER, NodeProcess, exchange

ROOT = Path(__file__).parents[2]
BUCKET = "travel"
LANDED_VBUCKETS = 64
WIDE, NARROW = (1440, 900), (390, 844)
HEIGHT_MAX = 1600
PAGES = ("overview", "streams", "changes", "documents", "history", "landing")
AIRPORTS = ("HAM", "CDG", "AMS", "OSL", "ATH", "DUB")
COLLECTIONS = ("inventory.hotel", "inventory.airport", "booking.trip")
_ENVIRONMENT = {**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}


def headwater(*arguments: str) -> None:
    command = [sys.executable, "-m", "headwater", *arguments]
    subprocess.run(command, env=_ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def running(*arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "headwater", *arguments]
    process = subprocess.Popen(command, env=_ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


class Writer:
    """Writes bookings over and over, at a varying rate, where their vbuckets are active."""

    def __init__(self, nodes: list[NodeProcess], vbuckets: int, *, share: float = 1.0) -> None:
        """`share` scales the rate of the writes."""
        self._share = share
        self._nodes = nodes
        self._collections = collection_ids(nodes[0])
        self._vbuckets = vbuckets
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _write(self) -> None:
        for turn in itertools.count():
            if self._is_over.is_set():
                return
            for at, node in enumerate(self._nodes):
                try:
                    self._write_to(node, turn * 2 + at)
                except (HeadwaterError, AssertionError, OSError):
                    # A lost node accepts nothing.
                    time.sleep(0.2)
            time.sleep(0.1)

    def _write_to(self, node: NodeProcess, turn: int) -> None:
        """Write one batch. The node refuses what is not active there, which is left for the other node."""
        chance = random.Random(turn // 2)
        count = int(self._share * (500 + 350 * math.sin(turn / 9) + chance.randrange(150)))
        batch = b"".join(self._trip(chance).encode() for _ in range(count))
        with node.connect(BUCKET) as connection:
            exchange(connection, batch, answers=count)

    def _trip(self, chance: random.Random) -> Set:
        number = chance.randrange(40_000)
        trip = {"id": number, "from": chance.choice(AIRPORTS), "to": "LIS", "price": 90 + number % 400}
        key = f"trip::{number:05d}".encode()
        return Set(
            key=key,
            value=json.dumps(trip).encode(),
            vbucket=vbucket_of(key, self._vbuckets),
            collection_id=chance.choice(self._collections),
        )


def collection_ids(node: NodeProcess) -> list[int]:
    scopes = httpx.get(f"{node.http_url}/pools/default/buckets/{BUCKET}/scopes", auth=(USER, PASSWORD)).json()["scopes"]
    found = {f"{scope['name']}.{one['name']}": int(one["uid"], 16) for scope in scopes for one in scope["collections"]}
    return [found[name] for name in COLLECTIONS]


@contextmanager
def cluster(folder: Path, vbuckets: int) -> Iterator[list[NodeProcess]]:
    """Run two nodes, one of which was lost, failed over, and has rejoined."""
    options = ("--bucket", BUCKET, "--vbuckets", str(vbuckets))
    with ExitStack() as stack:
        nodes = [stack.enter_context(NodeProcess(folder / f"node-{at}", *options)).start() for at in (1, 2)]
        url = f"couchbase://{nodes[0].address},{nodes[1].address}/{BUCKET}"
        headwater("cluster", "init", url, "--replicas", "1")
        for name in ("inventory", "booking", *COLLECTIONS):
            headwater("collections", "create", url, name)
        first = f"couchbase://{nodes[0].address}/{BUCKET}"
        stack.enter_context(running("tail", url, "--name", "trips-to-search"))
        stack.enter_context(running("tail", url, "--name", "headwater-land-travel", "--collection", COLLECTIONS[2]))
        stack.enter_context(Writer(nodes, vbuckets))
        time.sleep(12)
        headwater("drill", "hold-replicas", first)
        time.sleep(2)
        lost, ports = str(nodes[1].address), (nodes[1].ready["ready"], nodes[1].http_url)
        nodes[1].kill()
        headwater("cluster", "failover", first, lost)
        headwater("drill", "release-replicas", first)
        port, http_port = (one.rpartition(":")[2] for one in ports)
        again = NodeProcess(folder / "node-2-again", *options, "--port", port, "--http-port", http_port)
        nodes[1] = stack.enter_context(again).start()
        headwater("cluster", "add", first, lost)
        headwater("cluster", "rebalance", first)
        time.sleep(10)
        for vbucket in ("17", "210"):
            headwater("drill", "rollback", first, "--vbucket", vbucket, "--to", "30")
        yield nodes


def picture(browser: Browser, path: Path, *, whole_page: bool, ratio: int = 1) -> None:
    width = browser.run("return innerWidth")
    height = browser.run("return document.documentElement.scrollHeight") if whole_page else NARROW[1]
    height = min(height, HEIGHT_MAX)
    metrics = {"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": width < 600}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(1.5)
    browser.screenshot(path)


def go(browser: Browser, page: str, size: tuple[int, int], scheme: str) -> None:
    browser.resize(size)
    browser.prefer(scheme)
    browser.run(f"location.hash = '#/{page}'")
    browser.find(f"nav a[href='#/{page}'][aria-current=page]")
    time.sleep(2)


def take_all(browser: Browser, folder: Path) -> None:
    for page, size, scheme in itertools.product(PAGES, (WIDE, NARROW), ("light", "dark")):
        go(browser, page, size, scheme)
        if page == "streams":
            browser.run("document.querySelector('main button.disclose[aria-expanded=false]')?.click()")
            time.sleep(1)
        if page == "documents":
            browser.run("document.querySelector('.document-list a')?.click()")
            time.sleep(1)
        picture(browser, folder / f"{page}-{size[0]}-{scheme}.png", whole_page=True)


def take_shown(browser: Browser, folder: Path) -> None:
    go(browser, "overview", WIDE, "light")
    # The mouse is where the login was, and would trigger what is under it.
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 5, "y": 5})
    picture(browser, folder / "dashboard.png", whole_page=True)
    go(browser, "overview", NARROW, "dark")
    picture(browser, folder / "dashboard-phone.png", whole_page=False, ratio=2)


# --- the page of a landing ----------------------------------------------------------------------------------------


@contextmanager
def landing_page(folder: Path) -> Iterator[str]:
    """Run a landing from a bucket with writes and one rollback. Yields the address of its page."""
    options = ("--bucket", BUCKET, "--vbuckets", str(LANDED_VBUCKETS))
    with ExitStack() as stack:
        node = stack.enter_context(NodeProcess(folder / "landed", *options)).start()
        url, lake = f"couchbase://{node.address}/{BUCKET}", str(folder / "lake")
        for name in ("inventory", "booking", *COLLECTIONS):
            headwater("collections", "create", url, name)
        stack.enter_context(Writer([node], LANDED_VBUCKETS, share=0.1))
        command = [sys.executable, "-m", "headwater", "land", url, "--into", lake, "--runner", "local"]
        command += ["--every", "3s", "--fresh", "3s", "--ui", "0"]
        process = stack.enter_context(subprocess.Popen(command, env=_ENVIRONMENT, stderr=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        address = next(filter(None, (re.search(r"https?://\S+/ui/", line) for line in process.stderr)), None)
        assert address is not None, "the landing has no page"
        # Read its pipe to the end: a landing that can't write to it would block.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        time.sleep(40)
        headwater("drill", "rollback", url, "--vbucket", "17", "--to", "30")
        while not httpx.get(f"{address[0]}api/state").json()["lake"]["rollbacks"]:
            time.sleep(0.5)
        time.sleep(3)
        headwater("verify", url, lake)
        yield address[0]


def take_landing(browser: Browser, folder: Path, *, is_all: bool) -> None:
    shown = itertools.product((WIDE, NARROW), ("light", "dark")) if is_all else [(WIDE, "light")]
    for size, scheme in shown:
        browser.resize(size)
        browser.prefer(scheme)
        time.sleep(2)
        name = f"landing-{size[0]}-{scheme}.png" if is_all else "landing.png"
        picture(browser, folder / name, whole_page=True)


def main(arguments: Sequence[str]) -> None:
    is_all = "--all" in arguments
    named = [argument for argument in arguments if not argument.startswith("--")]
    folder = Path(named[0]) if named else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, running_browser(Path(scratch) / "profile") as browser:
        with landing_page(Path(scratch)) as address:
            browser.open(address)
            take_landing(browser, folder, is_all=is_all)
            browser.open("about:blank")
        with cluster(Path(scratch), 1024) as nodes:
            log_in(browser, nodes[0])
            browser.find(".status.live")
            time.sleep(20)
            (take_all if is_all else take_shown)(browser, folder)
        print(*browser.console(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
