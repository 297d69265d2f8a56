"""A consumer that tells the judge what it does.

    headwater judge --seeds 10 -- python examples/judge/consumer.py

It prints a line for each change, and one for each rollback: what it printed of that vbucket above the seqno is undone.
"""

from __future__ import annotations

import json
import os
import sys

import headwater
from headwater import Deletion, Expiration, HeadwaterError, Mutation, Rollback


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


def main() -> None:
    where = f"{os.environ['HEADWATER_CONNECTION']}/{os.environ['HEADWATER_BUCKET']}"
    user, password = os.environ["HEADWATER_USER"], os.environ["HEADWATER_PASSWORD"]
    with headwater.blocking.connect(where, user=user, password=password) as client:
        for change in client.changes(snapshots="as-they-come", name="judged"):
            line = line_of(change)
            if line is not None:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        main()
    except HeadwaterError as error:
        sys.exit(f"Error: {error}")
