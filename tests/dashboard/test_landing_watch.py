"""The landing's numbers on the dashboard: fetched from a real end point, and what goes wrong there."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import InvalidInput
from headwater.http import TOKEN_VARIABLE
from headwater.node.http.dashboard import samples
from headwater.node.http.dashboard.samples import Landings, fetch_landing
from support.dashboard_world import answering, metrics_text, serving
from support.node_process import run_serve


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
    assert (stopped["error"], stopped["is_ended"]) == ("connection refused", True)
    assert (stopped["numbers"], stopped["heard_ms"]) == (shown["numbers"], shown["heard_ms"])


def test_the_token_of_the_page_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, metrics_text(), "Bearer 0123456789abcdef") as url:
        assert fetch_landing(url).error == f"it answers with 401: start the node with its token in {TOKEN_VARIABLE}"
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
    monkeypatch.setattr(samples, "LANDING_BYTES_MAX", 100)
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
