"""What the dashboard tells of a bucket: rights, changes, documents, vbuckets, the live feed, and its bounds."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.client.cluster_map import vbucket_of
from headwater.http import serving as http_serving
from headwater.node.auth.login_checks import FREE_FAILURES
from headwater.node.http.dashboard import browser, dashboard
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId
from headwater.protocol.values import Datatype, ValueParts, encode_xattrs
from headwater.store.search import Search, SearchedBucket, search_changes
from headwater.store.settling import settle_now
from support.dashboard_world import ADMIN, OWN, READER, VBUCKETS, serving

OF_BUCKET = (
    "live", "changes", "documents", "document?key=a", "vbuckets/0", "branches", "collections", "streams?connection=a",
    "health", "versions?key=a", "events/1",
)  # fmt: skip


# --- rights -------------------------------------------------------------------------------------------------------


async def test_one_sees_what_one_may_see(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for path in OF_BUCKET:
            assert (await world.get(f"buckets/beer/{path}")).status_code == 401, path
        await world.log_in(READER)
        assert (await world.get("session")).json()["buckets"] == ["beer"]
        assert (await world.get("buckets/beer/changes")).status_code == 200
        for path in OF_BUCKET:
            hidden, missing = await world.get(f"buckets/wine/{path}"), await world.get(f"buckets/milk/{path}")
            assert (hidden.status_code, missing.status_code) == (403, 403), path
            assert hidden.text.replace("wine", "") == missing.text.replace("milk", "")


# --- changes and documents ----------------------------------------------------------------------------------------


async def test_changes_come_newest_first_wherever_they_lie(tmp_path: Path) -> None:
    """Some in blocks on disk, some in young commits, over many vbuckets; a plain list is what is compared with."""
    async with serving(tmp_path) as world:
        await world.log_in()
        orders = await world.with_collection("shop", "orders")
        chance, written = random.Random(7), []
        for number in range(300):
            key, vbucket = f"key::{chance.randrange(90):03d}", chance.randrange(VBUCKETS)
            collection = chance.choice((DEFAULT_COLLECTION, orders))
            if chance.random() < 0.1:
                world.beer.put_removal(vbucket, collection_id=collection, key=key.encode())
            else:
                world.beer.put_mutation(
                    vbucket, collection_id=collection, key=key.encode(), value=b"{}", datatype=Datatype.JSON
                )
            written.append((key, vbucket, collection))
            await world.committed()
            if number == 200:
                await world.node._loops["beer"].at_rest(lambda: settle_now(world.beer))
        newest = list(reversed(written))
        for query, wanted in (
            ({"rows": 120}, newest[:120]),
            ({"rows": 200, "key": "::01"}, [one for one in newest if "::01" in one[0]][:200]),
            ({"rows": 40, "collection": "shop.orders"}, [one for one in newest if one[2] == orders][:40]),
            ({"rows": 40, "vbucket": 3}, [one for one in newest if one[1] == 3][:40]),
        ):
            told = (await world.get("buckets/beer/changes", **query)).json()
            assert [(row["key"], row["vbucket"]) for row in told["changes"]] == [one[:2] for one in wanted]
        told = (await world.get("buckets/beer/changes", key="nowhere")).json()
        assert told["changes"] == []
        assert told["is_complete"]
        pages, before = [], ""
        while not pages or not told["is_complete"]:
            told = (await world.get("buckets/beer/changes", rows=70, before=before)).json()
            pages += [(row["key"], row["vbucket"]) for row in told["changes"]]
            before = f"{told['changes'][-1]['cas']}-{told['changes'][-1]['vbucket']}"
        assert pages == [one[:2] for one in newest], "the pages together are not all changes"
        removed = (await world.get("buckets/beer/changes", rows=200, op="deletion")).json()["changes"]
        assert {row["op"] for row in removed} == {"deletion"}


async def test_pages_and_times_when_many_are_written_at_one_moment(tmp_path: Path) -> None:
    """Vbuckets that are written at one moment have the same CAS."""
    async with serving(tmp_path) as world:
        await world.log_in()
        moment_ns, environment = 1_700_000_000_000_000_000, world.beer.environment
        for at_s in range(3):
            world.beer.environment = replace(environment, now_ns=lambda at_s=at_s: moment_ns + at_s * 10**9)
            for vbucket in range(VBUCKETS):
                await world.write(f"{at_s}/{vbucket}", vbucket=vbucket)
        world.beer.environment = environment
        seen, before = [], ""
        for _ in range(10):
            told = (await world.get("buckets/beer/changes", rows=5, before=before)).json()["changes"]
            seen += [row["key"] for row in told]
            before = f"{told[-1]['cas']}-{told[-1]['vbucket']}" if told else before
        assert len(seen) == len(set(seen)) == 3 * VBUCKETS
        start_ms = moment_ns // 10**6
        between = await world.get("buckets/beer/changes", rows=200, **{"from": start_ms + 500, "to": start_ms + 1500})
        assert {row["key"].split("/")[0] for row in between.json()["changes"]} == {"1"}
        assert between.json()["is_complete"]


async def test_the_versions_of_a_document(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        vbucket = vbucket_of(b"one", VBUCKETS)
        for value in (b"1", b"2"):
            await world.write("one", value, vbucket=vbucket)
        await world.write("one-more", b"9", vbucket=vbucket)
        world.beer.put_removal(vbucket, collection_id=DEFAULT_COLLECTION, key=b"one")
        await world.committed()
        asked = {"collection": "_default._default", "key": "one"}
        versions = (await world.get("buckets/beer/versions", **asked)).json()["versions"]
        assert [(row["op"], row["preview"]) for row in versions] == [
            ("deletion", ""),
            ("mutation", "2"),
            ("mutation", "1"),
        ]
        assert (await world.get("buckets/beer/versions", key="one")).status_code == 400


async def test_a_search_stops_at_its_bounds_and_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        await world.write("old")
        for number in range(20):
            await world.write(f"new-{number}")
        wanted = Search(rows=10, key_part=b"old", bytes_max=200, seconds_max=10)
        found = search_changes(SearchedBucket.of(world.beer), wanted, now_s=time.monotonic)
        assert found.frames == []
        assert not found.is_complete


WRONG: tuple[tuple[str, object], ...] = (
    ("rows", 0), ("rows", 201), ("rows", "x"), ("key", "k" * 251), ("vbucket", VBUCKETS), ("vbucket", -1),
    ("op", "rename"), ("from", "now"), ("to", 10**13), ("before", "1"), ("before", f"{2**63}-1"),
)  # fmt: skip


async def test_what_is_asked_for_has_limits(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        for name, value in WRONG:
            assert (await world.get("buckets/beer/changes", **{name: value})).status_code == 400, (name, value)


async def test_documents_are_those_of_today(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        for key in ("kept", "changed", "changed", "gone"):
            await world.write(key)
        world.beer.put_removal(0, collection_id=DEFAULT_COLLECTION, key=b"gone")
        await world.committed()
        told = (await world.get("buckets/beer/documents")).json()
        assert [row["key"] for row in told["documents"]] == ["changed", "kept"]


async def test_documents_are_counted_by_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        orders = await world.with_collection("shop", "orders")
        for turn in range(2):
            for number in range(40):
                await world.write(f"{number % 30}", vbucket=number % 3, collection=(DEFAULT_COLLECTION, orders)[turn])
            await world.node._loops["beer"].at_rest(lambda: settle_now(world.beer))
        world.beer.put_removal(0, collection_id=orders, key=b"0")
        await world.committed()
        told = (await world.get("buckets/beer/collections")).json()
        assert told == {"documents": {"0": 30, f"{orders:x}": 29}, "share": 1.0}
        monkeypatch.setattr(browser, "COUNTED_EVERY_S", 0.0)
        monkeypatch.setattr(browser, "SEARCH_S_MAX", 0.0)
        assert (await world.get("buckets/beer/collections")).json()["share"] < 1.0


async def test_a_document_by_its_key(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        await world.with_collection("shop", "orders")
        vbucket = vbucket_of(b"ale", VBUCKETS)
        value = encode_xattrs(ValueParts({"meta": b'{"a":1}'}, b'{"name":"ale"}'))
        await world.write("ale", value, vbucket=vbucket, datatype=Datatype.JSON | Datatype.XATTR)
        for query in ({"key": "ale"}, {"key": "ale", "collection": "_default._default"}):
            told = (await world.get("buckets/beer/document", **query)).json()
            assert json.loads(told["value"]) == {"name": "ale"}
            assert told["xattrs"] == {"meta": {"a": 1}}
            assert told["vbucket"] == vbucket
        for query, status in (
            ({"key": "stout"}, 404),
            ({"key": "ale", "collection": "shop.orders"}, 404),
            ({"key": "ale", "collection": "shop.none"}, 404),
            ({"key": ""}, 400),
        ):
            assert (await world.get("buckets/beer/document", **query)).status_code == status


async def test_values_that_are_no_text_are_shown_all_the_same(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        vbucket = vbucket_of(b"raw", VBUCKETS)
        await world.write("raw", b"\xff\x00\xfe", vbucket=vbucket, datatype=Datatype.RAW)
        assert (await world.get("buckets/beer/document", key="raw")).json()["value_bytes"] == 3
        # Broken on purpose: it says that it is compressed, and is not.
        await world.write("raw", b"\xff\xff\xff", vbucket=vbucket, datatype=Datatype.SNAPPY)
        assert (await world.get("buckets/beer/changes")).status_code == 200


# --- vbuckets -----------------------------------------------------------------------------------------------------


async def test_failover_logs(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        for number in range(5):
            await world.write(f"a{number}", vbucket=3)
        assert (await world.get("buckets/beer/branches")).json() == {"branched": [], "unbranched": VBUCKETS}
        await world.node.roll_back("beer", VBucketId(3), Seqno(2))
        told = (await world.get("buckets/beer/branches")).json()
        assert [one["vbucket"] for one in told["branched"]] == [3]
        assert [entry["seqno"] for entry in told["branched"][0]["failover_log"]] == [2, 0]
        one = (await world.get("buckets/beer/vbuckets/3")).json()
        assert one["failover_log"] == told["branched"][0]["failover_log"]
        assert (await world.get(f"buckets/beer/vbuckets/{VBUCKETS}")).status_code == 404
        assert (await world.get("buckets/beer/vbuckets/x")).status_code == 404


# --- the live feed ------------------------------------------------------------------------------------------------


async def test_the_feed_tells_everything_first_and_then_what_has_changed(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        async with world.live() as messages:
            kind, hello = await anext(messages)
            assert kind == "hello"
            assert len(hello["vbuckets"]) == VBUCKETS
            assert [one["name"] for one in hello["collections"]] == ["_default"]
            assert len(hello["cluster"]["map"]) == VBUCKETS
            await world.write("a", vbucket=5)
            seen: list[list[int]] = []
            async for kind, tick in messages:
                assert kind == "tick"
                seen += tick["vbuckets"]
                if seen:
                    break
            assert seen == [[5, VBucketState.ACTIVE, 1, 1, 0]]
            assert tick["totals"]["changes"] == 1
            assert "cluster" not in tick


async def test_states_and_rollbacks_are_events(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        for number in range(4):
            await world.write(f"a{number}", vbucket=1)
        await asyncio.sleep(1.2)
        async with world.live() as messages:
            await anext(messages)
            world.beer.set_vbucket_state(2, VBucketState.DEAD)
            await world.committed()
            await world.node.roll_back("beer", VBucketId(1), Seqno(1))
            events = []
            async for _, tick in messages:
                events += tick["events"]
                if len(events) >= 2:
                    break
            kinds = {event["kind"]: event for event in events}
            assert kinds["state"]["vbuckets"] == [2]
            assert "active → dead" in kinds["state"]["text"]
            assert kinds["drill"]["vbuckets"] == [1]
            assert kinds["drill"]["text"] == "drill: 1 vbucket rolled back, 3 changes of 1 vbucket lost"
            (branch,) = (await world.get(f"buckets/beer/events/{kinds['drill']['number']}")).json()["branches"]
            assert (branch["vbucket"], branch["kept"], branch["known"]) == (1, 1, 4)


async def test_the_feed_ends_with_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        async with world.live() as messages:
            await anext(messages)
            await world.client.post("/ui/api/logout", headers={"Origin": world.url, **OWN})
            kinds = [kind async for kind, _ in messages]
            assert kinds[-1] == "bye"


async def test_the_feed_ends_with_the_node(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        async with world.live() as messages:
            await anext(messages)
            stopping = asyncio.create_task(world.node.stop())
            async with asyncio.timeout(4):
                async for _ in messages:
                    pass
                await stopping


async def test_feeds_of_one_user_leave_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "VIEWERS_MAX", 3)
    async with serving(tmp_path) as world:
        await world.log_in(READER)
        async with world.live() as oldest, world.live() as older, world.live() as newest:
            for feed in (oldest, older, newest):
                await anext(feed)
            assert (await world.get("buckets/beer/live")).status_code == 503
            world.client.cookies.clear()
            await world.log_in(ADMIN)
            async with world.live() as other:
                assert (await anext(other))[0] == "hello"
                async for _ in oldest:
                    pass
                assert (await anext(newest))[0] == "tick"


async def test_viewers_are_bounded_and_make_room_when_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "VIEWERS_MAX", 1)
    async with serving(tmp_path) as world:
        await world.log_in()
        async with world.live() as messages:
            await anext(messages)
            assert (await world.get("buckets/beer/live")).status_code == 503
        async with asyncio.timeout(10):
            while True:
                async with world.client.stream("GET", "/ui/api/buckets/beer/live") as response:
                    if response.status_code == 200:
                        break
                await asyncio.sleep(0.1)


# --- logging in on the dashboard: cookies, where requests may come from, the throttle, and the end of a session -----


async def test_the_right_password_begins_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        assert (await world.get("session")).json()["user"] is None
        answer = await world.log_in()
        assert answer.status_code == 204
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/ui" in cookie
        told = (await world.get("session")).json()
        assert told["user"] == ADMIN[0]
        assert told["buckets"] == ["beer", "wine"]


async def test_a_wrong_password_gets_no_session_and_counts_in_the_throttle_of_the_node(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for _ in range(FREE_FAILURES):
            answer = await world.log_in((ADMIN[0], "wrong"))
            assert answer.status_code == 401
            assert not {"www-authenticate", "set-cookie"} & answer.headers.keys(), "a browser would open a window"
        assert (await world.get("buckets/beer/changes")).status_code == 401
        assert (await world.log_in()).status_code == 429
        assert (await world.client.get("/pools", auth=ADMIN)).status_code == 429


async def test_only_the_own_page_may_log_in_or_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        foreign = ("http://evil.example", "http://127.0.0.1:1", "null")
        refused = [{}, OWN, {"Origin": world.url}, *({"Origin": origin, **OWN} for origin in foreign)]
        body = {"user": ADMIN[0], "password": ADMIN[1]}
        for headers in refused:
            assert (await world.client.post("/ui/api/login", json=body, headers=headers)).status_code == 403
        await world.log_in()
        for headers in refused:
            assert (await world.client.post("/ui/api/logout", headers=headers)).status_code == 403
        assert (await world.get("session")).json()["user"] == ADMIN[0]


NO_LOG_INS = (
    b"{", b"[]", b'{"user": "ann"}', b'{"user": "", "password": "x"}', b'{"user": 1, "password": "x"}',
    b'{"user": "ann", "password": "\\ud800"}', b'{"user": "%s", "password": "x"}' % (b"a" * 1000), b"[" * 5000,
)  # fmt: skip


async def test_a_log_in_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for body, status in (*((body, 400) for body in NO_LOG_INS), (b" " * 9000, 413)):
            answer = await world.client.post("/ui/api/login", content=body, headers={"Origin": world.url, **OWN})
            assert answer.status_code == status, body[:40]


async def test_logging_out_ends_the_session_itself_and_not_only_the_cookie(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        cookies = dict(world.client.cookies)
        assert (await world.client.post("/ui/api/logout", headers={"Origin": world.url, **OWN})).status_code == 204
        for name, value in cookies.items():
            world.client.cookies.set(name, value)
        assert (await world.get("session")).json()["user"] is None


async def test_a_user_with_another_password_is_logged_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in(READER)
        users = world.node.users.remove(READER[0])
        assert (await world.get("session")).json()["user"] == READER[0]
        again = users.new_user(
            READER[0], "another", world.node.users.by_name[READER[0]].grants, salts=bytes(32 * 3)[:48]
        )
        world.node._listener.service.users = users.add(again)
        assert (await world.get("session")).json()["user"] is None


async def test_a_session_that_nobody_uses_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "SESSION_S", -1.0)
    async with serving(tmp_path) as world:
        await world.log_in()
        assert (await world.get("session")).json()["user"] is None


async def test_sessions_of_one_user_end_none_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "SESSIONS_MAX", 2)
    async with serving(tmp_path) as world:
        await world.log_in()
        cookies = dict(world.client.cookies)
        for _ in range(3):
            world.client.cookies.clear()
            assert (await world.log_in(READER)).status_code == 204
        assert (await world.get("session")).json()["user"] == READER[0]
        world.client.cookies.clear()
        world.client.cookies.update(cookies)
        assert (await world.get("session")).json()["user"] == ADMIN[0]


async def test_the_oldest_session_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "SESSIONS_MAX", 2)
    async with serving(tmp_path) as world:
        await world.log_in()
        first = dict(world.client.cookies)
        for _ in range(2):
            world.client.cookies.clear()
            await world.log_in()
        assert (await world.get("session")).json()["user"] == ADMIN[0]
        world.client.cookies.clear()
        for name, value in first.items():
            world.client.cookies.set(name, value)
        assert (await world.get("session")).json()["user"] is None
