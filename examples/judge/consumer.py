"""A consumer that tells the judge what it does.

    headwater judge --seeds 10 -- python examples/judge/consumer.py

It prints a line for each change, and one for each rollback: what it printed of that vbucket above the seqno is undone.
Its offsets are in a file, so it can be killed (`headwater judge --restarts`): what it printed above them is undone when
it starts again, and printed again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import headwater
from headwater import Deletion, Expiration, HeadwaterError, Mutation, Offsets, Rollback

SAVE_EVERY = 20
"""Changes from one save of the offsets to the next."""


def line_of(change: headwater.Change) -> dict[str, object] | None:
    """What the judge has to know of a change; None for changes that are not of documents."""
    match change:
        case Mutation():
            return {"op": "set", "key": change.key, "seqno": change.seqno, "value": change.json()}
        case Deletion() | Expiration():
            return {"op": "delete", "key": change.key, "seqno": change.seqno}
        case Rollback():
            return {"op": "rollback", "vbucket": change.vbucket, "seqno": change.seqno}
    return None


def follow(client: headwater.blocking.Client, place: Path) -> None:
    start = Offsets.from_json(place.read_text()) if place.exists() else Offsets(client.bucket_uuid)
    seqnos = dict.fromkeys(range(client.cluster_map.vbuckets), 0)
    seqnos |= {vbucket: offset.seqno for vbucket, offset in start.offsets.items()}
    for vbucket, seqno in seqnos.items():
        print(json.dumps({"op": "rollback", "vbucket": vbucket, "seqno": seqno}), flush=True)
    changes = client.changes(start=start, snapshots="as-they-come", name="judged")
    for number, change in enumerate(changes, start=1):
        line = line_of(change)
        if line is not None:
            print(json.dumps(line), flush=True)
        if number % SAVE_EVERY == 0:
            # The old offsets stay until the new ones are whole.
            new = place.with_suffix(".new")
            new.write_text(changes.offsets.to_json())
            new.replace(place)


def main() -> None:
    where = f"{os.environ['HEADWATER_CONNECTION']}/{os.environ['HEADWATER_BUCKET']}"
    user, password = os.environ["HEADWATER_USER"], os.environ["HEADWATER_PASSWORD"]
    with headwater.blocking.connect(where, user=user, password=password) as client:
        follow(client, Path(os.environ["HEADWATER_STATE"]) / "offsets.json")


if __name__ == "__main__":
    try:
        main()
    except HeadwaterError as error:
        sys.exit(f"Error: {error}")
