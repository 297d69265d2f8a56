"""A landing and its page: what is shown while it runs and when it has stopped, and the links to and from the node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.cli.management import find_node_page
from headwater.lake.lake_look import LakeWatch, LandingNote
from headwater.lake.location import Location
from headwater.lake_page.app import LakeState
from headwater.landing.query import Landing, LandingQuery
from support.driven_source import RunHere
from support.landings import ALWAYS_FRESH, GROUPS, SourceBucket
from support.node_process import PASSWORD, USER

WAIT_S_MAX = 30.0


def shown_when(state: LakeState, is_so: Any) -> dict[str, Any]:
    state.every_s, state.share_max = 0.0, float("inf")
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not is_so(shown := state.show()):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.02)
    return shown


def test_a_landing_and_its_page(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = Landing(source=bucket.options, into=str(tmp_path / "lake"), fresh=ALWAYS_FRESH, groups=GROUPS)
    location = Location.of(landing.into)
    keys = bucket.keys("user", 5, vbucket=1)
    bucket.put(keys, b'{"n": 1}')
    kept = bucket.high_seqnos()[1]
    lake = landing.prepare()
    running: list[LandingQuery] = []

    def note() -> LandingNote | None:
        return running[0].note if running else None

    state = LakeState(LakeWatch(location), landing=note)
    assert state.show()["landing"]["state"] == "starting"
    query = landing.start(RunHere(), lake=lake, every=0.05)
    running.append(query)
    query.processAllAvailable()
    shown = shown_when(state, lambda it: it["landing"]["lag_s"] is not None and it["lake"]["documents"] == 5)
    assert (shown["landing"]["state"], shown["landing"]["bucket"]) == ("running", bucket.name)
    assert shown["lake"]["rows_per_s"] > 0
    assert USER not in shown["landing"]["source"]
    assert "<th>documents</th><td>5 in 1 table</td>" in query._repr_html_()

    bucket.put(keys[:2], b'{"n": 2}')
    query.processAllAvailable()
    bucket.fail_over(1, kept)
    shown = shown_when(state, lambda it: it["lake"]["rollbacks"] == 1)
    [rollback] = [event for event in shown["lake"]["events"] if event["kind"] == "rollback"]
    assert (rollback["vbuckets"], rollback["undone"]) == (1, 2)
    assert rollback["why"].startswith("A failover, a crash or a restore: 1 vbucket continued from an earlier seqno")
    assert {row[4] for row in state.undone(rollback["batch"]).rows} == {key.decode() for key in keys[:2]}

    # The node is one of ours, and is found without a password over HTTP.
    page = find_node_page(bucket.url, bucket.settings.credentials, None)
    assert page == f"{bucket.node.http.base_url}/ui/"
    query.say_where(page="http://127.0.0.1:8080/ui/", node_page=page)

    # Elsewhere, what the notes beside the tables say.
    elsewhere = LakeState(LakeWatch(location))
    assert elsewhere.show()["landing"]["node_page"] == page
    query.stop()
    stopped = shown_when(elsewhere, lambda it: it["landing"]["state"] == "stopped")
    assert stopped["landing"]["is_bound"]
    assert stopped["landing"]["lag_s"] > 0
    assert query.note.time_s == stopped["landing"]["time_s"], "it was stopped then, and not just now"
    assert stopped["lake"]["verdict"] is None
    environment = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
    verified = CliRunner(env=environment).invoke(main, ["verify", bucket.url, landing.into])
    assert verified.exit_code == 0, verified.output
    verdict = elsewhere.show()["lake"]["verdict"]
    assert (verdict["is_equal"], verdict["sentence"]) == (True, "Equal: 5 documents in 1 collection.")


def test_a_landing_that_failed_says_why(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = Landing(source=bucket.options, into=str(tmp_path / "lake"), groups=GROUPS)
    lake = landing.prepare()

    class Failing(RunHere):
        def __call__(self, tasks: Any) -> list[Any]:
            raise RuntimeError("the disk is full")

    bucket.put([b"a"], b"1")
    query = landing.start(Failing(), lake=lake)
    with pytest.raises(RuntimeError):
        query.awaitTermination()
    shown = LakeState(LakeWatch(Location.of(landing.into))).show()
    assert (shown["landing"]["state"], shown["landing"]["failure"]) == ("failed", "the disk is full")
