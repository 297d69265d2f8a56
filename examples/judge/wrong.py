"""Consumers that do one thing wrong, to see that the judge finds it.

    headwater judge -- python examples/judge/wrong.py ignores-rollbacks

Each reads a few changes at a time and resumes from its offsets, as a job does that is started again and again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace

from consumer import line_of

import headwater
from headwater import HeadwaterError, Offsets

MISTAKES = ("none", "ignores-rollbacks", "newest-vbuuid", "snapshot-end")
CHANGES_AT_A_TIME = 10
PAUSE_S = 0.05


def run(client: headwater.blocking.Client, mistake: str) -> None:
    start = Offsets(client.bucket_uuid)
    while True:
        reading = client.changes(start=_spoiled(client, start, mistake), end="now", snapshots="as-they-come")
        try:
            for _, change in zip(range(CHANGES_AT_A_TIME), reading, strict=False):
                line = line_of(change)
                if line is not None and not (mistake == "ignores-rollbacks" and line["op"] == "rollback"):
                    print(json.dumps(line), flush=True)
            start = reading.offsets
        except HeadwaterError:
            # The server has less than these offsets say, after a rollback. It tries again until there is more.
            pass
        finally:
            reading.close()
        time.sleep(PAUSE_S)


def _spoiled(client: headwater.blocking.Client, offsets: Offsets, mistake: str) -> Offsets:
    """The offsets to resume from, with the mistake in them."""
    changed = dict(offsets.offsets)
    if mistake == "snapshot-end":
        # It takes a snapshot for finished that it has read in part: what lies between is never read.
        changed = {vbucket: replace(offset, seqno=offset.snapshot_end) for vbucket, offset in changed.items()}
    if mistake == "newest-vbuuid":
        # It keeps seqnos alone, and takes them to be of the branch that the server is on now.
        now = client.changes(start="now", no_value=True)
        now.start()
        changed = {vbucket: replace(offset, vbuuid=now.offsets[vbucket].vbuuid) for vbucket, offset in changed.items()}
        now.close()
    return replace(offsets, offsets=changed)


def main() -> None:
    mistake = sys.argv[1] if sys.argv[1:] else ""
    if mistake not in MISTAKES:
        sys.exit(f"Error: name a mistake: {', '.join(MISTAKES)}")
    where = f"{os.environ['HEADWATER_CONNECTION']}/{os.environ['HEADWATER_BUCKET']}"
    user, password = os.environ["HEADWATER_USER"], os.environ["HEADWATER_PASSWORD"]
    with headwater.blocking.connect(where, user=user, password=password) as client:
        run(client, mistake)


if __name__ == "__main__":
    try:
        main()
    except HeadwaterError as error:
        sys.exit(f"Error: {error}")
