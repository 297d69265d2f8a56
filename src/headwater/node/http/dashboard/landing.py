"""The numbers of landings, fetched from where they show them to Prometheus (`land --ui` or `land --metrics-port`).

The dashboard keeps one `Landings`, and the live feed shows it. Where to look is an option of the node, never a user's
choice: a page must not make the node ask any address.
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import IO
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from headwater.errors import InvalidInput
from headwater.http.asking import TOKEN_VARIABLE

LANDING_EVERY_S = 2.0
LANDING_S_MAX = 2.0
LANDING_BYTES_MAX = 1024 * 1024
LANDINGS_MAX = 8
"""How often the metrics of a landing are fetched, how long that may take, how long they may be, and how many."""
_PREFIX = "headwater_land_"
_PAGE = f"{_PREFIX}page_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingNumbers:
    """What one end point has answered last, by bucket and pipeline; `error` where it could not be asked since. The name
    of a pipeline may be empty."""

    url: str
    landings: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    pages: dict[tuple[str, str], str] = field(default_factory=dict)
    """Where the landing's own page is."""
    heard_ms: int | None = None
    """When that was."""
    error: str | None = None
    is_ended: bool = False
    """Nothing listens there any more: the process has ended, and the network is well."""


class Landings:
    """Asks the end points again and again."""

    def __init__(self, urls: Sequence[str]) -> None:
        if len(urls) > LANDINGS_MAX:
            raise InvalidInput(f"{len(urls)} landings to watch", hint=f"Watch at most {LANDINGS_MAX}")
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise InvalidInput(
                    f"{url!r} is not an address of metrics", hint="Give one like http://127.0.0.1:9100/metrics"
                )
        self.numbers = [LandingNumbers(url=url, error="not asked yet") for url in urls]

    async def watch(self) -> None:
        while self.numbers:
            self.numbers = [await asyncio.to_thread(fetch_landing, known.url, known) for known in self.numbers]
            await asyncio.sleep(LANDING_EVERY_S)

    def of(self, bucket: str) -> list[dict[str, object]]:
        """What is known of the landings of a bucket, and of the end points that have never answered. One that has
        stopped is shown with what it said last."""
        shown: list[dict[str, object]] = []
        for known in self.numbers:
            failed = {} if known.error is None else {"error": known.error, "is_ended": known.is_ended}
            about = {"heard_ms": known.heard_ms, **failed}
            if known.error is not None and not known.landings:
                shown.append({"url": known.url, **about})
            for (of, pipeline), numbers in known.landings.items():
                if of == bucket:
                    page = {"page": known.pages[of, pipeline]} if (of, pipeline) in known.pages else {}
                    # What it is known by in the page.
                    url = f"{known.url}#{pipeline}" if pipeline else known.url
                    shown.append({"url": url, **about, "numbers": numbers, **page})
        return shown


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """The end point was named; it does not get to name another one."""


def fetch_landing(url: str, before: LandingNumbers | None = None) -> LandingNumbers:
    """Ask one end point. What goes wrong there is part of the result, beside what it said `before`, and not raised."""
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
    # A landing that is served beyond this machine wants the token of its page.
    token = os.environ.get(TOKEN_VARIABLE)
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with opener.open(asked, timeout=LANDING_S_MAX) as answer:
            return _parse(url, answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        is_ended = isinstance(reason, ConnectionRefusedError)
        return replace(before or LandingNumbers(url=url), error=_words(error, reason), is_ended=is_ended)


def _words(error: Exception, reason: object) -> str:
    """What went wrong, without the numbers of the system."""
    if isinstance(error, urllib.error.HTTPError):
        hint = f": start the node with its token in {TOKEN_VARIABLE}" if error.code == HTTPStatus.UNAUTHORIZED else ""
        return f"it answers with {error.code}{hint}"
    said = (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or "no answer"
    return f"{said[0].lower()}{said[1:]}"


def _parse(url: str, answer: IO[bytes]) -> LandingNumbers:
    text = answer.read(LANDING_BYTES_MAX + 1)
    if len(text) > LANDING_BYTES_MAX:
        raise ValueError(f"the answer has more than {LANDING_BYTES_MAX} bytes")
    landings: dict[tuple[str, str], dict[str, float]] = {}
    pages: dict[tuple[str, str], str] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            which = sample.labels.get("bucket", ""), sample.labels.get("pipeline", "")
            if sample.name == _PAGE and (page := sample.labels.get("url", "")).startswith(("http://", "https://")):
                pages[which] = page
            elif sample.name.startswith(_PREFIX) and "bucket" in sample.labels:
                name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                landings.setdefault(which, {})[name] = sample.value
    return LandingNumbers(url=url, landings=landings, pages=pages, heard_ms=int(time.time() * 1000))
