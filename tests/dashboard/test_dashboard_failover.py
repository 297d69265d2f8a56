"""The dashboard of a cluster in a real browser: a node dies, and the map of the one that is left changes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from browser import Browser

from headwater.client.handshake import Credentials
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.node.memberships import PEER_FEATURES
from node_process import PASSWORD, USER, NodeProcess, StartNode

VBUCKETS = 32


def run(nodes: list[NodeProcess], *steps: str) -> None:
    async def coordinate() -> None:
        login = Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=PEER_FEATURES)
        coordinator = Coordinator([nodes[0].address], login)
        try:
            for step in steps:
                if step == "make a cluster":
                    await coordinator.init(replicas=1)
                    for node in nodes[1:]:
                        await coordinator.add(node.address)
                    await coordinator.rebalance()
                else:
                    await coordinator.failover([step])
        finally:
            coordinator.close()

    asyncio.run(coordinate())


def cells(browser: Browser, state: str) -> int:
    """How many vbuckets of this node have a state."""
    return len(browser.all(f".map-node[data-this=true] .cell[data-state={state}]"))


@pytest.fixture
def nodes(start_node: StartNode) -> list[NodeProcess]:
    return [start_node("--vbuckets", str(VBUCKETS)) for _ in range(2)]


def test_the_map_changes_when_a_node_fails_over(browser: Browser, nodes: list[NodeProcess]) -> None:
    run(nodes, "make a cluster")
    browser.open(f"{nodes[0].http_url}/ui/")
    browser.find("#user").send_keys(USER)
    browser.find("#password").send_keys(PASSWORD)
    browser.find("button[type=submit]").click()
    half = VBUCKETS // 2
    browser.until(lambda: (cells(browser, "active"), cells(browser, "replica")) == (half, half), "no half is active")
    assert len(browser.all(".map-node")) == 2
    assert len(browser.all(".map-node[data-this=false] .cell[data-state=active]")) == half
    if shots := os.environ.get("HEADWATER_SCREENSHOTS"):
        browser.screenshot(Path(shots) / "cluster.png")
    lost = str(nodes[1].address)
    nodes[1].kill()
    run(nodes[:1], lost)
    browser.until(lambda: cells(browser, "active") == VBUCKETS, "the copies did not become active")
    assert cells(browser, "replica") == 0
    browser.until(
        lambda: any("replica → active" in event.text for event in browser.all(".events li[data-kind=state]")),
        "the failover is no event",
    )
    assert browser.console() == []
