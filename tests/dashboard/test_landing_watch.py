"""The landing's numbers on the dashboard: fetched from a real end point, and what goes wrong there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headwater.cli.land import LandingCollector, LandingMetrics
from headwater.errors import InvalidInput
from headwater.http.requests import TOKEN_VARIABLE
from headwater.landing.loop import LandingStatus
from headwater.node.http.dashboard import landing
from headwater.node.http.dashboard.landing import Landings, fetch_landing
from support.dashboard_world import serving
from support.node_process import run_serve


@contextmanager
def answering(status: int, body: bytes, authorization: str | None = None, **headers: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.headers["Authorization"] == authorization else 401)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def metrics_text() -> bytes:
    registry = CollectorRegistry()
    status = LandingStatus(
        is_active=True, doing="reading", batch=2, rows=1200, rollbacks=1, documents=900, tables=2, lag_seqnos=17,
        lag_s=2.5, documents_age_s=4.5, last_batch_s=0.3, last_merge_s=None, failures=0,
    )  # fmt: skip
    beer = LandingMetrics("beer", lambda: status, page="http://127.0.0.1:8080/ui/")
    registry.register(LandingCollector(beer))
    return generate_latest(registry)


async def test_the_numbers_of_a_landing_are_on_the_feed(tmp_path: Path) -> None:
    with answering(200, metrics_text()) as url:
        async with serving(tmp_path, landing_urls=(url,)) as world:
            await world.log_in()
            async with world.live() as messages:
                async for _, told in messages:
                    if "numbers" in told["landings"][0]:
                        break
                numbers = told["landings"][0]["numbers"]
                assert (numbers["lag_seqnos"], numbers["lag_seconds"], numbers["documents_age_seconds"]) == (
                    17,
                    2.5,
                    4.5,
                )
                assert numbers["rows"] == 1200
                assert numbers["rollbacks"] == 1


def test_a_landing_that_has_stopped_is_shown_as_it_was_with_its_page() -> None:
    with answering(200, metrics_text()) as url:
        landings = Landings([url])
        landings.numbers = [fetch_landing(url)]
        [shown] = landings.of("beer")
        assert (shown["page"], "error" in shown) == ("http://127.0.0.1:8080/ui/", False)
    landings.numbers = [fetch_landing(url, landings.numbers[0])]
    [stopped] = landings.of("beer")
    assert "refused" in str(stopped["error"])
    assert (stopped["numbers"], stopped["heard_ms"]) == (shown["numbers"], shown["heard_ms"])


def test_the_token_of_the_page_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, metrics_text(), "Bearer 0123456789abcdef") as url:
        assert fetch_landing(url).error
        monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
        assert fetch_landing(url).error is None


def test_a_landing_of_another_bucket_is_not_shown_there() -> None:
    with answering(200, metrics_text()) as url:
        landings = Landings([url])
        landings.numbers = [fetch_landing(url)]
    assert landings.of("wine") == []
    assert len(landings.of("beer")) == 1


def test_two_pipelines_of_one_bucket_are_two_landings() -> None:
    text = "".join(
        f'headwater_land_lag_seqnos{{bucket="beer",pipeline="{name}"}} {lag}\n'
        f'headwater_land_page_info{{bucket="beer",pipeline="{name}",url="http://h/ui/#/{name}"}} 1\n'
        for name, lag in (("one", 1), ("two", 2))
    )
    with answering(200, text.encode()) as url:
        landings = Landings([url])
        landings.numbers = [fetch_landing(url)]
    shown = [(it["url"], it["page"], it["numbers"]) for it in landings.of("beer")]
    assert shown == [
        (f"{url}#one", "http://h/ui/#/one", {"lag_seqnos": 1}),
        (f"{url}#two", "http://h/ui/#/two", {"lag_seqnos": 2}),
    ]


def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "refused" in str(fetch_landing("http://127.0.0.1:1/metrics").error)
    with answering(500, b"") as url:
        assert fetch_landing(url).error
    with answering(200, b"headwater_land_rows{bucket=") as url:
        assert fetch_landing(url).error
    with answering(200, metrics_text()) as target, answering(302, b"", Location=target) as url:
        assert fetch_landing(url).error
    monkeypatch.setattr(landing, "LANDING_BYTES_MAX", 100)
    with answering(200, metrics_text()) as url:
        assert "100 bytes" in str(fetch_landing(url).error)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:9100", "http://", "ftp://host/metrics"])
def test_only_addresses_of_metrics_are_taken(url: str) -> None:
    with pytest.raises(InvalidInput):
        Landings([url])


def test_the_number_of_landings_is_bounded() -> None:
    with pytest.raises(InvalidInput):
        Landings(["http://127.0.0.1:9100/metrics"] * 9)


def test_a_node_refuses_an_address_that_it_could_not_ask(tmp_path: Path) -> None:
    ended = run_serve("--data", str(tmp_path), "--port", "0", "--http-port", "0", "--landing-metrics", "file:///x")
    assert ended.returncode == 1
    assert "is not an address of metrics" in ended.stderr
    assert "Traceback" not in ended.stderr
