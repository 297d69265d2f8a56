"""One member of a group in a separate process, with a reader that only reports what it would read.

It appends to a file that all members share: a line when it begins to read a vbucket, and a line when it has
finished with one, before it releases it. So the order of the lines is a possible order of events.

Run as `group_member_process.py URL GROUP MEMBER LOG`. It leaves cleanly at SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable

from headwater.client.blocking_bucket import bootstrap
from headwater.client.groups import Assignment, GroupBucket, Membership
from headwater.client.groups.group_document import group_bucket
from headwater.client.groups.lease_group import LeaseGroup
from headwater.client.settings import ClientSettings
from support.group_fakes import joined
from support.node_process import PASSWORD, USER

VBUCKETS = 64
LEASE_S, INTERVAL_S, MARGIN_S = 3.0, 0.4, 1.0


class SharedLog:
    """Lines of JSON that several processes append to."""

    def __init__(self, path: str, member: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._member = member

    def write(self, event: str, vbuckets: Iterable[int] = ()) -> None:
        line = {"member": self._member, "event": event, "vbuckets": sorted(vbuckets)}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def settings_of(url: str, *, password: str = PASSWORD) -> ClientSettings:
    return ClientSettings.make(url, user=USER, password=password)


def bucket_of(url: str) -> GroupBucket:
    settings = settings_of(url)
    return group_bucket(settings, vbuckets=bootstrap(settings).cluster_map.vbuckets)


async def follow(membership: Membership, log: SharedLog) -> None:
    """Do what a reader does, without reading."""
    assignment = Assignment(number=0)
    try:
        while True:
            newer = await membership.assignment_changed(assignment)
            change = newer.since(assignment)
            log.write("ended", change.drop | change.hand_over)
            await membership.release(change.hand_over)
            log.write("began", change.begin)
            assignment = newer
    finally:
        log.write("ended", assignment.vbuckets)


async def main(url: str, group: str, member: str, log_path: str) -> None:
    log = SharedLog(log_path, member)
    lease = LeaseGroup(group, member, lease_s=LEASE_S, interval_s=INTERVAL_S, margin_s=MARGIN_S)
    async with joined(lease, bucket_of(url)) as membership:
        following = asyncio.create_task(follow(membership, log))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
        await asyncio.wait([following])
    log.write("left")
    if not following.cancelled():
        following.result()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
