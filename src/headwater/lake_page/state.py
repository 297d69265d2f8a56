"""What the page shows: a look at the tables, and how the landing stands that writes them.

`LakeState` is asked by the handlers of `app`, in threads: reading tables blocks. It looks again only if someone asks,
and not more often than it should; all who ask meanwhile get the same answer. A look that fails is part of what is
shown, beside the last that did not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headwater.errors import HeadwaterError
from headwater.lake.lake_look import LakeLook, LakeWatch, Sample
from headwater.lake.layout import TableKind
from headwater.lake.notes import LANDING_SILENT_S, LandingNote

LOOK_EVERY_S = 2.0
STORE_LOOK_EVERY_S = 10.0
"""In an object store every look is some requests."""
LOOK_SHARE_MAX = 0.05
"""Which part of the time may be spent on looks before they become fewer: with hundreds of tables one takes seconds."""
PROBLEM_CHARS_MAX = 500
POINTS_MAX = 600
POINT_EVERY_S = 1.0
"""What the chart of the lag can look back."""

GetLanding = Callable[[], LandingNote | None]
"""A landing of this process as it is now; None while it is being started."""


@dataclass(slots=True)
class LagPoints:
    """The lag over time, as far as it was known. May be used from several threads."""

    _points: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, now_s: float, status: Mapping[str, Any]) -> None:
        time_ms, lag_s, age_s = int(now_s * 1000), status.get("lag_s"), status.get("documents_age_s")
        with self._lock:
            is_due = not self._points or time_ms - self._points[-1][0] >= POINT_EVERY_S * 1000
            if is_due and lag_s is not None and age_s is not None:
                self._points.append((time_ms, lag_s, age_s))

    def show(self) -> dict[str, list[float]]:
        with self._lock:
            times, lags, ages = zip(*self._points, strict=True) if self._points else ((), (), ())
        return {"time_ms": [*times], "lag_s": [*lags], "age_s": [*ages]}


class LakeState:
    """All that the page shows. Methods may be called from any thread, and block."""

    def __init__(self, watch: LakeWatch, landing: GetLanding | None = None) -> None:
        """`landing` is where it runs in this process. Otherwise its notes beside the tables are read."""
        self._watch = watch
        self._landing = landing
        self._reading = threading.Lock()
        self._look: LakeLook | None = None
        self._next_look_s = float("-inf")
        self._problem: str | None = None
        self._points = LagPoints()
        self.every_s = LOOK_EVERY_S if watch.location.is_local else STORE_LOOK_EVERY_S
        self.share_max = LOOK_SHARE_MAX

    def show(self) -> dict[str, Any]:
        """How everything stands now, as JSON."""
        with self._reading:
            if time.monotonic() >= self._next_look_s:
                self._look_again()
            look, problem, now_s = self._look, self._problem, time.time()
            landing = self._shown_landing(look, now_s)
            return {
                "now_ms": int(now_s * 1000),
                "uri": self._watch.location.uri,
                "problem": problem,
                "landing": landing,
                "lake": None if look is None else _lake_object(look, now_s),
                "lags": self._points.show(),
            }

    def _look_again(self) -> None:
        began_s = time.monotonic()
        try:
            self._look = self._watch.look()
            problem = "; ".join(self._look.unreadable)
        except (HeadwaterError, OSError) as error:
            problem = str(error)
        # Where the log of a table is damaged, delta-rs says so in many lines.
        self._problem = " ".join(problem.split())[:PROBLEM_CHARS_MAX] or None
        ended_s = time.monotonic()
        self._next_look_s = ended_s + max(self.every_s, (ended_s - began_s) / self.share_max)

    def tick(self) -> None:
        """Take the lag of a landing in this process, whether anyone looks or not."""
        note = None if self._landing is None else self._landing()
        if note is not None and note.is_running:
            self._points.add(time.time(), note.status)

    def sample(self, kind: TableKind, name: str) -> Sample:
        with self._reading:
            return self._watch.sample(kind, name)

    def undone(self, batch: int) -> Sample:
        with self._reading:
            return self._watch.undone(batch)

    # --- the landing --------------------------------------------------------------------------------------------------

    def _shown_landing(self, look: LakeLook | None, now_s: float) -> dict[str, Any]:
        """How the landing stands, or stood when it was last heard of."""
        if self._landing is not None:
            note = self._landing()
            state = "starting" if note is None else _state_of(note, now_s)
        else:
            note = None if look is None else look.landing
            state = "unknown" if note is None else _state_of(note, now_s)
        shown: dict[str, Any] = {"state": state, "lag_s": None, "documents_age_s": None, "is_bound": state != "running"}
        if note is not None:
            members = asdict(note)
            status = members.pop("status")
            shown |= {**members, "status": status}
        if note is not None and state == "running":
            # What the note says has become older since.
            passed_s = max(0.0, now_s - note.time_s)
            for name in ("lag_s", "documents_age_s"):
                known = note.status.get(name)
                shown[name] = None if known is None else known + passed_s
            self._points.add(now_s, shown)
        elif look is not None:
            shown["lag_s"] = None if look.as_of_s is None else max(0.0, now_s - look.as_of_s)
            age_s = look.documents_as_of_s
            shown["documents_age_s"] = None if age_s is None else max(0.0, now_s - age_s)
        return shown


def _state_of(note: LandingNote, now_s: float) -> str:
    if not note.is_running:
        return "stopped" if note.failure is None else "failed"
    return "running" if now_s - note.time_s < LANDING_SILENT_S else "silent"


def _lake_object(look: LakeLook, now_s: float) -> dict[str, Any]:
    members = asdict(look)
    del members["landing"]
    return {**members, "looked_ago_s": max(0.0, now_s - look.time_s)}
