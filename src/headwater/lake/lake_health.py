"""Whether a landing is well, and what to do where it is not: by its notes beside the tables, or by itself where it runs
in this process. The page of a landing shows it, and `headwater health` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headwater.findings import Finding, Level, Verdict
from headwater.phrases import counted

if TYPE_CHECKING:
    from headwater.lake.lake_look import LandingNote
    from headwater.lake.lake_look import Verdict as Verified

LAG_S_MAX = 300.0
"""A landing that is further behind than this does not keep up, or is stuck."""
_AGAIN = "Start `headwater land` again: it resumes where the tables end"
_SEE_LOG = "Check the log of the landing"


def health_of_landing(
    state: str, note: LandingNote | None, *, lag_s: float | None, problem: str | None, verified: Verified | None
) -> Verdict:
    """The verdict on a landing.

    Args:
        state: As `LandingNote.state_at` says, or `starting`, or `unknown` where there is no note.
        note: What the landing said last.
        lag_s: All that was written to the bucket longer ago than this is in `changes`; None where that is unknown.
        problem: Why the tables can't be read; None where they can.
        verified: What `headwater verify` found last.
    """
    status = {} if note is None else note.status
    found = [*_ended(state, note)]
    if state == "running":
        found += _running(status, lag_s)
    found += _tables(status)
    # A landing that is being started has not made its tables yet.
    if problem is not None and state != "starting":
        do = "Check the location and the rights of this user on it"
        found.append(Finding(check="tables", level=Level.BAD, text=f"The tables can't be read: {problem}", do=do))
    if verified is not None and not verified.is_equal:
        text = f"The last verify, at {_moment(verified.time_s)}, found differences: {verified.sentence}"
        do = "Run `headwater verify` again, and `headwater repair` if they are still there"
        found.append(Finding(check="verified", level=Level.BAD, text=text, do=do))
    behind = "" if lag_s is None else f", {lag_s:,.0f} s behind the bucket"
    runs = f"the landing is running{behind}" if state == "running" else "the landing has landed everything"
    return Verdict.of(found, well=f"Healthy: {runs}")


def _ended(state: str, note: LandingNote | None) -> Iterator[Finding]:
    """Why no landing is running, as far as that is known."""
    if note is None:
        text, do = "It is unknown whether a landing is running: there is no status file beside the tables", _SEE_LOG
        if state == "starting":
            text, do = "The landing is starting", "Wait a few seconds"
        yield Finding(check="running", level=Level.WARN, text=text, do=do)
    elif state == "failed":
        text = f"The landing failed at {_moment(note.time_s)}: {note.failure}"
        yield Finding(check="running", level=Level.BAD, text=text, do=f"Fix that. {_AGAIN}")
    elif state == "silent":
        text = f"No sign of the landing since {_moment(note.time_s)}: it was killed, or {note.host} can't write here"
        yield Finding(check="running", level=Level.BAD, text=text, do=_AGAIN)
    elif state == "stopped" and note.every_s is not None:
        # One without an interval has ended because all was landed.
        text = f"The landing was stopped at {_moment(note.time_s)}"
        yield Finding(check="running", level=Level.BAD, text=text, do=_AGAIN)


def _running(status: Mapping[str, Any], lag_s: float | None) -> Iterator[Finding]:
    if failures := int(status.get("failures") or 0):
        why = status.get("failure") or "its log says why"
        text = f"The landing failed {counted(failures, 'time')} in a row, and retries: {why}"
        yield Finding(check="failures", level=Level.WARN, text=text, do=_SEE_LOG)
    if lag_s is not None and lag_s > LAG_S_MAX:
        text, do = f"The landing is {lag_s:,.0f} s behind the bucket", "Give it more cores, or larger batches"
        yield Finding(check="lag", level=Level.WARN, text=text, do=do)


def _tables(status: Mapping[str, Any]) -> Iterator[Finding]:
    aside = status.get("set_aside") or ()
    for one in aside:
        text = f"The table of {one['name']} is set aside, and lacks changes that the others have: {one['reason']}"
        yield Finding(check="set-aside", level=Level.BAD, text=text, do=one["hint"])
    if more := int(status.get("tables_set_aside") or 0) - len(aside):
        text = f"{counted(more, 'more table')} set aside"
        yield Finding(check="set-aside", level=Level.BAD, text=text, do="The log of the landing names them")
    if said := status.get("catalog_failure"):
        yield Finding(check="catalog", level=Level.WARN, text=_sentence(said), do="The landing registers them later")
    if said := status.get("advice"):
        yield Finding(check="merges", level=Level.WARN, text="Merges do not keep up", do=_sentence(said))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _moment(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
