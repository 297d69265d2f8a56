"""The page's routes: who may use them, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.errors import InvalidInput, LakeUnreachable
from headwater.http import serving
from headwater.lake.lake_look import LakeWatch, LandingNote, keep_landing
from headwater.lake.location import Location
from headwater.lake_page import app as app_module
from headwater.lake_page.app import Lakes, LakeState, PageAddress, page_app
from support.lake_model import HOTEL, SmallLake

TOKEN = "a-token-of-some-length"
OWN_PAGE = {"X-Headwater-Dashboard": "1", "Origin": "http://127.0.0.1"}
SHOWN = ("/ui/api/state", "/ui/api/pipelines", "/ui/api/sample?kind=changes", "/metrics")


@pytest.fixture
def state(tmp_path: Path) -> LakeState:
    small = SmallLake(tmp_path / "lake")
    small.write(0, "a")
    small.land()
    return LakeState(LakeWatch(Location.of(str(small.directory))))


def look_always(state: LakeState) -> None:
    state.every_s, state.share_max = 0.0, float("inf")


class Client:
    """A browser: it keeps cookies."""

    def __init__(self, shown: LakeState | Lakes, token: str | None = None, *, host: str = "127.0.0.1") -> None:
        app = page_app(shown, token=token, metrics=lambda: (b"up 1", "text/plain"), any_host=token is not None)
        self._transport, self._url = httpx.ASGITransport(app), f"http://{host}"
        self.cookies = httpx.Cookies()

    async def ask(self, method: str, path: str, **parts: Any) -> httpx.Response:
        how: Any = {"transport": self._transport, "base_url": self._url, "follow_redirects": True}
        async with httpx.AsyncClient(cookies=self.cookies, **how) as client:
            answer = await client.request(method, path, **parts)
            self.cookies = client.cookies
            return answer

    def get(self, path: str, **parts: Any) -> httpx.Response:
        return asyncio.run(self.ask("GET", path, **parts))

    def post(self, path: str, **parts: Any) -> httpx.Response:
        return asyncio.run(self.ask("POST", path, **parts))


def test_on_this_machine_no_token_is_needed(state: LakeState) -> None:
    client = Client(state)
    for path in SHOWN:
        assert client.get(path).status_code == 200
    assert client.get("/ui/api/state").json()["lake"]["documents"] == 1
    page = client.get("/", headers={"Accept": "text/html"})
    assert page.url.path == "/ui/"
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_page_of_another_site_is_not_led_here(state: LakeState) -> None:
    refused = Client(state, host="evil.example.org").get("/ui/api/state")
    assert (refused.status_code, "not known as" in refused.json()["message"]) == (421, True)
    assert Client(state, host="localhost").get("/ui/api/state").status_code == 200


def test_with_a_token_nothing_is_shown_without_it(state: LakeState) -> None:
    client = Client(state, TOKEN)
    for path in (*SHOWN, "/ui/api/undone?batch=0"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": f"Bearer {TOKEN}x"}).status_code == 401
    assert client.get("/ui/api/session").json() == {
        "needs_token": True, "is_in": False, "version": "", "pipelines": [],
    }  # fmt: skip
    assert client.get("/ui/api/state", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_the_token_is_given_once(state: LakeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "WRONG_TOKEN_S", 0.0)
    client = Client(state, TOKEN)
    for given, status in (({"token": "wrong"}, 401), ({"token": 7}, 400), ([], 400), ({}, 400)):
        assert client.post("/ui/api/login", json=given, headers=OWN_PAGE).status_code == status
    half = b'{"token": "\\ud800"}'
    assert client.post("/ui/api/login", content=half, headers=OWN_PAGE).status_code == 400
    assert client.post("/ui/api/login", json={"token": TOKEN}).status_code == 403, "not from the page"
    answer = client.post("/ui/api/login", json={"token": TOKEN}, headers=OWN_PAGE)
    assert answer.status_code == 204
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert TOKEN not in answer.headers["set-cookie"]
    assert client.get("/ui/api/state").status_code == 200
    monkeypatch.setattr(serving, "SESSION_S", -1.0)
    assert client.get("/ui/api/state").status_code == 200, "the last time that it counts"
    assert client.get("/ui/api/state").status_code == 401


def test_several_lakes_are_told_apart_by_their_pipelines(state: LakeState, tmp_path: Path) -> None:
    note = LandingNote(
        time_s=0, started_s=0, source="couchbase://here/b", bucket="b", host="", every_s=None, is_running=False,
        failure="it is gone", status={"documents": 7},
    )  # fmt: skip
    other = LakeState(Location.of(str(tmp_path / "other")), landing=lambda: note)
    client = Client({"shop": state, "a/b": other}, TOKEN)
    client.post("/ui/api/login", json={"token": TOKEN}, headers=OWN_PAGE)
    assert client.get("/ui/api/session").json()["pipelines"] == ["shop", "a/b"]
    shop, failed = client.get("/ui/api/pipelines").json()
    assert (shop["name"], shop["state"], failed["name"], failed["state"]) == ("shop", "starting", "a/b", "failed")
    assert (failed["failure"], failed["documents"], failed["source"]) == ("it is gone", 7, "couchbase://here/b")
    assert client.get("/ui/api/state?pipeline=shop").json()["lake"]["documents"] == 1
    assert client.get("/ui/api/state?pipeline=a%2Fb").json()["lake"] is None
    assert client.get("/ui/api/sample?kind=changes&pipeline=shop").status_code == 200
    for path in ("/ui/api/state", "/ui/api/state?pipeline=x", "/ui/api/undone?batch=0&pipeline="):
        assert client.get(path).json()["message"] == "pipeline is one of shop, a/b"


def test_logging_out_ends_it(state: LakeState) -> None:
    client = Client(state, TOKEN)
    client.post("/ui/api/login", json={"token": TOKEN}, headers=OWN_PAGE)
    cookies = dict(client.cookies)
    assert client.post("/ui/api/logout", headers=OWN_PAGE).status_code == 204
    client.cookies.update(cookies)
    assert client.get("/ui/api/state").status_code == 401


def test_what_asks_for_nonsense_is_refused(state: LakeState) -> None:
    client = Client(state)
    for path, status in (
        ("/ui/api/sample?kind=users", 400),
        (f"/ui/api/sample?kind=documents&name={'x' * 700}", 400),
        ("/ui/api/sample?kind=documents&name=../changes", 503),
        ("/ui/api/undone?batch=-1", 400),
        ("/ui/api/undone?batch=99", 503),
        ("/ui/assets/..%2f__init__.py", 404),
        ("/elsewhere", 404),
        (f"/ui/api/state?{'x' * 20_000}", 431),
    ):
        answer = client.get(path)
        assert (answer.status_code, bool(answer.json()["message"])) == (status, True), path


async def test_so_many_may_wait_and_no_more(state: LakeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "READS_MAX", 1)
    reading, may_end = threading.Event(), threading.Event()

    def slow() -> object:
        reading.set()
        may_end.wait()
        return {}

    monkeypatch.setattr(state, "show", slow)
    client = Client(state)
    first = asyncio.create_task(client.ask("GET", "/ui/api/state"))
    await asyncio.to_thread(reading.wait)
    assert (await client.ask("GET", "/ui/api/state")).status_code == 503
    may_end.set()
    assert (await first).status_code == 200


def test_a_lake_that_is_removed_or_made_again_is_seen_as_such(state: LakeState, tmp_path: Path) -> None:
    look_always(state)
    assert state.show()["lake"]["batch"] == 0
    shutil.rmtree(tmp_path / "lake")
    assert "does not contain the tables of a landing" in state.show()["problem"]
    SmallLake(tmp_path / "lake")
    shown = state.show()
    assert (shown["problem"], shown["lake"]["batch"], len(shown["lake"]["events"])) == (None, -1, 0)


def test_a_table_that_can_not_be_opened_hides_no_other(tmp_path: Path) -> None:
    small = SmallLake(tmp_path / "lake")
    small.write(0, "a")
    small.write(0, "h", collection=HOTEL)
    small.land()
    (tmp_path / f"lake/documents/inventory.hotel/_delta_log/{0:020}.json").write_text("{")
    shown = LakeState(LakeWatch(Location.of(str(tmp_path / "lake")))).show()
    assert "inventory.hotel can't be read" in shown["problem"]
    assert [table["name"] for table in shown["lake"]["tables"]] == ["", "_default._default"]
    assert shown["lake"]["documents_as_of_s"] is None


def test_a_merge_that_is_seen_before_the_landing_says_so_is_true(state: LakeState, tmp_path: Path) -> None:
    status = {"lag_s": 0.5, "documents_age_s": 22.0}
    known: dict[str, Any] = {"source": "", "bucket": "", "host": "", "every_s": 1.0, "is_running": True}
    now_s = time.time()
    for noted_s, merged in ((now_s - 4, True), (now_s + 60, False)):
        keep_landing(
            Location.of(str(tmp_path / "lake")), LandingNote(time_s=noted_s, started_s=0.0, status=status, **known)
        )
        look_always(state)
        landing = state.show()["landing"]
        assert (landing["documents_age_s"] == landing["lag_s"]) is merged


def test_a_look_that_fails_is_shown_beside_the_last(state: LakeState, monkeypatch: pytest.MonkeyPatch) -> None:
    look_always(state)
    assert state.show()["problem"] is None

    def fail(watch: LakeWatch) -> None:
        raise LakeUnreachable("the store is away", hint="Wait for it")

    monkeypatch.setattr(LakeWatch, "look", fail)
    shown = state.show()
    assert "the store is away" in shown["problem"]
    assert shown["lake"]["documents"] == 1


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "127.0.0.1", 8080),
        ("localhost:1", "localhost", 1),
        ("[::1]:0", "::1", 0),
        ("127.1.2.3:9", "127.1.2.3", 9),
    ],
)
def test_where_the_page_is_served(text: str, host: str, port: int) -> None:
    assert PageAddress.make(text, None) == PageAddress(host=host, port=port)


@pytest.mark.parametrize("text", ["", "x", ":80", "70000", "host:", "a b:80", "0.0.0.0:80", "[::]:80", "10.0.0.1:80"])
def test_where_it_is_not(text: str) -> None:
    with pytest.raises(InvalidInput):
        PageAddress.make(text, None)
