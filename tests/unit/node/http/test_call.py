"""What the HTTP side refuses: paths, methods, and what is too long or too slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headwater.http import serving
from support.http_node import SCOPES, Client


def test_paths_and_methods_that_do_not_exist(ask: Client) -> None:
    for path in ("/pool", "/pools/other", "/pools/default/buckets/beer/docs", f"{SCOPES}/a/b"):
        answer = ask("GET", path)
        assert (answer.status_code, answer.json()) == (404, {"message": "There is nothing here: begin at /pools"})
    answer = ask("PUT", SCOPES)
    assert answer.status_code == 405
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))
    assert answer.json()["message"].startswith("PUT is not allowed here")
    assert ask("GET", f"{SCOPES}/shop").status_code == 405
    # HEAD is GET without the body.
    for path in ("/pools", "/pools/default/b/beer", "/pools/default/bs/beer"):
        assert ask("HEAD", path).status_code == 200


def test_long_heads_are_refused(ask: Client) -> None:
    for parts in (
        {"headers": {"X-Long": "x" * serving.HEAD_BYTES_MAX}},
        {"params": {"q": "x" * serving.HEAD_BYTES_MAX}},
    ):
        answer = ask("GET", "/pools", **parts)
        assert (answer.status_code, answer.json()) == (431, {"message": "Path and headers have at most 16384 bytes"})


def test_long_bodies_are_refused(ask: Client) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b"x" * 8192

    for body in (b"x" * (serving.BODY_BYTES_MAX + 1), pieces()):
        answer = ask("POST", SCOPES, content=body)
        assert (answer.status_code, answer.json()) == (413, {"message": "A body has at most 65536 bytes"})


def test_slow_bodies_are_refused(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_S_MAX", 0.05)

    async def trickle() -> AsyncIterator[bytes]:
        yield b"name="
        await asyncio.sleep(10)

    assert ask("POST", SCOPES, content=trickle()).status_code == 408
