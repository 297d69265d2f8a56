"""The landing pipeline's numbers, fetched from where it shows them to Prometheus (`headwater land --metrics-port`).

The dashboard keeps one `Landings`, and the live feed shows it. Where to look is an option of the node, never a user's
choice: a page must not make the node ask any address.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from headwater.errors import InvalidInput
from headwater.node.http.limits import LANDING_BYTES_MAX, LANDING_EVERY_S, LANDING_S_MAX, LANDINGS_MAX

_PREFIX = "headwater_land_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingNumbers:
    """What one end point has answered, by bucket; `error` where it could not be asked."""

    url: str
    buckets: dict[str, dict[str, float]] = field(default_factory=dict)
    error: str | None = None


class Landings:
    """Asks the end points again and again."""

    def __init__(self, urls: Sequence[str]) -> None:
        if len(urls) > LANDINGS_MAX:
            raise InvalidInput(f"{len(urls)} landings to watch", hint=f"Watch at most {LANDINGS_MAX}")
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise InvalidInput(
                    f"{url!r} is no address of metrics", hint="Give one like http://127.0.0.1:9100/metrics"
                )
        self.numbers = [LandingNumbers(url=url, error="not asked yet") for url in urls]

    async def watch(self) -> None:
        while self.numbers:
            self.numbers = [await asyncio.to_thread(fetch_landing, known.url) for known in self.numbers]
            await asyncio.sleep(LANDING_EVERY_S)

    def of(self, bucket: str) -> list[dict[str, object]]:
        """What is known of the landings of a bucket, and of the end points that don't answer."""
        shown: list[dict[str, object]] = []
        for numbers in self.numbers:
            if numbers.error is not None:
                shown.append({"url": numbers.url, "error": numbers.error})
            elif bucket in numbers.buckets:
                shown.append({"url": numbers.url, "numbers": numbers.buckets[bucket]})
        return shown


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """The end point was named; it does not get to name another one."""


def fetch_landing(url: str) -> LandingNumbers:
    """Ask one end point. What goes wrong there is part of the result, not raised."""
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=LANDING_S_MAX) as answer:
            return LandingNumbers(url=url, buckets=_parse(answer))
    except (urllib.error.URLError, OSError, ValueError) as error:
        return LandingNumbers(url=url, error=str(getattr(error, "reason", None) or error) or "no answer")


def _parse(answer: IO[bytes]) -> dict[str, dict[str, float]]:
    text = answer.read(LANDING_BYTES_MAX + 1)
    if len(text) > LANDING_BYTES_MAX:
        raise ValueError(f"the answer has more than {LANDING_BYTES_MAX} bytes")
    buckets: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and "bucket" in sample.labels:
                name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                buckets.setdefault(sample.labels["bucket"], {})[name] = sample.value
    return buckets
