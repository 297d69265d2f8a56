"""The verdict: every check finds what it is for, the worst comes first, and each says what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headwater.findings import Level
from headwater.node.history import Event, Kind
from headwater.node.http.dashboard.health import CHECKS, LOSS_SHOWN_MS, Examined, health_of
from headwater.node.http.dashboard.samples import BucketSampler
from headwater.protocol.cluster_config import NO_NODE, NodeAddress, PublishedConfig
from headwater.protocol.messages.dcp_streams import VBucketState
from support.dashboard_world import READER, VBUCKETS, serving

NOW_MS = 1_700_000_000_000
GB = 10**9
STATES = np.array([VBucketState.ACTIVE, VBucketState.REPLICA], dtype=np.uint8)


def examined(**changes: Any) -> Examined:
    """A node of two that is well, or with what is not; names that an `Examined` does not have are the sampler's."""
    sampler = {
        "name": "beer",
        "now_ms": lambda: NOW_MS,
        "bucket": SimpleNamespace(vbuckets=SimpleNamespace(damage={}, states=STATES)),
        "cluster": SimpleNamespace(peers={}),
        "holds_replicas": False,
        "consumers": [SimpleNamespace(vbuckets=[1])],
        "lags": lambda: np.array([0, 5]),
        "stuck_connections": lambda still_s: [],
        "events": SimpleNamespace(events=[]),
    }
    whole = Examined(
        sampler=cast(BucketSampler, SimpleNamespace(**{name: changes.pop(name, sampler[name]) for name in sampler})),
        config=config(),
        this_node=0,
        is_waiting=False,
        landings=(),
        free_bytes=50 * GB,
        disk_bytes=100 * GB,
        url="couchbase://one:11210/beer",
    )
    whole = replace(whole, **changes)
    return replace(whole, copies=whole.config and whole.config.copies(whole.unreachable))


def config(rows: Any = ((0, 1), (1, 0)), *, settled: bool = True, nodes: int = 2) -> PublishedConfig:
    names = ("one", "two", "six")[:nodes]
    addresses = tuple(NodeAddress(host=name, kv_port=11210) for name in names)
    return PublishedConfig(
        revision=1, bucket="beer", uuid="u", nodes=addresses, rows=rows, replicas=1, settled=settled
    )  # fmt: skip


def peers(**peer: Any) -> SimpleNamespace:
    members = {"name": "two:11210", "numbers": None, "error": None, "is_heard": True} | peer
    return SimpleNamespace(peers={"two": SimpleNamespace(**members)})


def loss(*, ago_ms: int) -> SimpleNamespace:
    event = Event(
        number=1, time_ms=NOW_MS - ago_ms, kind=Kind.FAILOVER, node="two", count=2, lost_changes=605, lost_vbuckets=2
    )
    return SimpleNamespace(events=[event])


DAMAGED = SimpleNamespace(vbuckets=SimpleNamespace(damage={1: 0}, states=STATES))
GONE = {"unreachable": ("two:11210",)}
HELD = SimpleNamespace(is_held=True)
STUCK = SimpleNamespace(name="spark-7", backlog_items=4_000)
LANDING = "http://127.0.0.1:9100/metrics"
LANDED = {"url": LANDING, "numbers": {"rows": 1.0}}
CASES: list[tuple[str, Level, str, dict[str, Any]]] = [
    ("waiting", Level.BAD, "serves nothing yet", {"is_waiting": True}),
    ("left-out", Level.BAD, "no longer in the cluster", {"this_node": None}),
    ("damage", Level.BAD, "1 vbucket stopped", {"bucket": DAMAGED}),
    ("nodes", Level.BAD, "1 node of 2 can't be reached: two:11210", {**GONE, "config": config(((0,), (0,)))}),
    ("orphans", Level.BAD, "No node has 1 vbucket", {"config": config(((NO_NODE, 1), (1, 0)))}),
    ("replicas", Level.WARN, "2 replicas missing", {"config": config(((0, NO_NODE), (1, NO_NODE)))}),
    ("settled", Level.WARN, "are moving", {"config": config(settled=False)}),
    ("held", Level.WARN, "drill holds the copies back on two:11210", {"cluster": peers(numbers=HELD, heard_ms=NOW_MS)}),
    ("unfed", Level.WARN, "1 copy on this node", {"consumers": []}),
    ("disk", Level.WARN, "5.0 GB of 100 GB", {"free_bytes": 5 * GB}),
    ("disk", Level.BAD, "1.0 GB of 100 GB", {"free_bytes": 1 * GB}),
    ("landing", Level.BAD, "has not answered yet: timed out", {"landings": [{"url": LANDING, "error": "timed out"}]}),
    ("landing", Level.BAD, "can't be reached: timed out", {"landings": [{**LANDED, "error": "timed out"}]}),
    ("landing", Level.BAD, "was stopped or has failed", {"landings": [{**LANDED, "error": "", "is_ended": True}]}),
    ("landing", Level.BAD, "has stopped", {"landings": [{"url": LANDING, "numbers": {"active": 0.0}}]}),
    ("landing", Level.WARN, "failed 2 batches", {"landings": [{"url": LANDING, "numbers": {"failures": 2.0}}]}),
    ("landing", Level.WARN, "400 s behind", {"landings": [{"url": LANDING, "numbers": {"lag_seconds": 400.0}}]}),
    ("stuck", Level.WARN, "spark-7 takes no changes, with 4,000 waiting", {"stuck_connections": lambda _: [STUCK]}),
    ("losses", Level.WARN, "at least 605 changes of 2 vbuckets lost", {"events": loss(ago_ms=1_000)}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "level", "words", "changes"), CASES, ids=[case[2] for case in CASES])
def test_what_is_wrong_is_found(check: str, level: Level, words: str, changes: dict[str, Any]) -> None:
    verdict = health_of(examined(**changes))
    assert [(one.check, one.level) for one in verdict.findings] == [(check, level)]
    assert verdict.level is level
    assert words in verdict.text
    assert verdict.do, "it does not say what to do"


def test_a_cluster_that_is_well_has_no_finding() -> None:
    verdict = health_of(examined(cluster=peers(heard_ms=NOW_MS), events=loss(ago_ms=LOSS_SHOWN_MS + 1)))
    assert verdict.findings == ()
    assert verdict.text == "Healthy: 2 nodes answer, every vbucket has its 1 replica"


def test_a_node_that_has_not_answered_yet_is_not_called_well() -> None:
    verdict = health_of(examined(cluster=peers(heard_ms=NOW_MS, is_heard=False)))
    assert verdict.text == "Nothing wrong is known: 1 of 2 nodes have not answered yet"


def test_the_worst_comes_first() -> None:
    verdict = health_of(examined(config=config(((0, NO_NODE),)), **GONE, events=loss(ago_ms=0)))
    assert [one.check for one in verdict.findings] == ["nodes", "replicas", "losses"]
    assert "headwater cluster failover couchbase://one:11210/beer two:11210" in verdict.do


def test_copies_are_judged_by_the_nodes_that_can_be_reached() -> None:
    verdict = health_of(examined(config=config(((0, 1), (1, 2), (2, 0)), nodes=3), **GONE))
    assert [one.check for one in verdict.findings] == ["unserved", "nodes", "unknown-replicas"]
    assert verdict.text.startswith("No node that can be reached has the active copy of 1 of 3 vbuckets")
    copies = verdict.show()["copies"]
    assert (copies["active"], copies["active_unreachable"], copies["active_missing"]) == (2, 1, 0)
    assert (copies["replicas"], copies["replicas_unknown"], copies["replicas_missing"]) == (2, 1, 0)
    cut_off = health_of(examined(config=config(((0, 1), (1, 2)), nodes=3), unreachable=("two:11210", "six:11210")))
    assert "failover" not in cut_off.do, "it may be this node that is cut off"


def test_every_check_has_a_case() -> None:
    cases = [*(changes for _, _, _, changes in CASES), GONE]
    found = {one.check: check for check in CHECKS for changes in cases for one in check(examined(**changes))}
    assert set(found.values()) == set(CHECKS)


async def test_a_node_answers_with_its_verdict(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        assert (await world.get("buckets/beer/health")).status_code == 401
        await world.log_in()
        answer = (await world.get("buckets/beer/health")).json()
        assert [one for one in answer["findings"] if one["check"] != "disk"] == []
        for vbucket in range(VBUCKETS):
            world.beer.numbers.damage[vbucket] = cast(Any, "broken")
        answer = (await world.get("buckets/beer/health")).json()
        assert (answer["level"], answer["text"].split(":")[0]) == ("bad", f"{VBUCKETS} vbuckets stopped")
        assert (await world.client.get("/headwater/buckets/beer/health", auth=READER)).json() == answer
        assert (await world.client.get("/headwater/buckets/wine/health", auth=READER)).status_code == 403
        whole = (await world.client.get("/headwater/health", auth=READER)).json()
        assert (whole["level"], whole["text"], whole["buckets"]) == ("bad", answer["text"], {"beer": answer})
