"""`headwater replicate`: the proxy between a producer and a consumer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from headwater.cli.options import GivenOptions, LoginOptions, connection_options, errors_reported, options_from
from headwater.cli.output import click
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address, ConnectionString
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.errors import HeadwaterError, InvalidInput, StatusError
from headwater.node.membership import PEER_FEATURES
from headwater.node.replication.proxy import Proxy
from headwater.options import option
from headwater.phrases import counted
from headwater.protocol.messages.dcp_streams import StreamEndReason, StreamFlags
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import VBucketId
from headwater.protocol.status import Status

_VBUCKET_MAX = 1023
_SHOW_EVERY_S = 0.5
_STREAMS_OPENING = 64
_ASK_EVERY_S = 0.05
_STUCK_S_MAX = 60.0
"""How long the target may make no progress in persisting what it received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateOptions:
    """The options of the command, except the nodes."""

    vbuckets: str | None = option(
        "The vbuckets to copy, such as 0-15,20. By default, all that are active there.", metavar="LIST"
    )
    bucket: str | None = option("The bucket, if the URLs do not name it.", metavar="NAME")
    takeover: bool = option("Hand the vbuckets over: they become active at --to.", False)
    once: bool = option("Exit when the current contents have been copied.", False)
    name: str = option("The name of the DCP connections.", "headwater-replicate")
    as_json: bool = option("Print the result as one line of JSON.", False, cli_name="--json")

    @property
    def flags(self) -> StreamFlags:
        return StreamFlags.TAKEOVER if self.takeover else StreamFlags.LATEST if self.once else StreamFlags(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    source: Address
    target: Address
    source_login: Login
    target_login: Login
    vbuckets: Sequence[VBucketId] | None
    asked: ReplicateOptions


@click.command()
@click.option("--from", "from_url", metavar="URL", required=True, help="The node on which the vbuckets are active.")
@click.option("--to", "to_url", metavar="URL", required=True, help="The node on which they are replicas.")
@options_from(ReplicateOptions)
@connection_options
@errors_reported
def replicate(from_url: str, to_url: str, given: GivenOptions, login: LoginOptions) -> None:
    """Copy vbuckets from one node to another, as Couchbase's replication proxy does.

    The proxy opens a DCP connection to each of the two nodes and lets the second one stream from the first. It runs
    until it is interrupted, or ends by itself with --once or --takeover. The vbuckets must exist as replicas at --to
    (set-vbucket). The nodes of a cluster do all this by themselves: see `headwater cluster`.

    With --once and --takeover, the command ends when --to has confirmed, for every vbucket, that it has persisted
    everything it received.

    The exit code is 0 when --to has persisted everything, 1 for a failure, 2 for an invalid command line and 130 after
    Ctrl-C.

    \b
    Examples:
      headwater replicate --from couchbase://127.0.0.1:11210/default \\
        --to couchbase://127.0.0.1:11310/default --once
      headwater replicate --from couchbase://a/default \\
        --to couchbase://b/default --vbuckets 0-15 --takeover
    """
    asked = given.make(ReplicateOptions)
    if asked.takeover and asked.once:
        raise click.UsageError("--takeover ends by itself, so --once says nothing")
    logins: list[Login] = []
    addresses: list[Address] = []
    for url in (from_url, to_url):
        where = ConnectionString.parse(url)
        chosen = where.bucket or asked.bucket
        if chosen is None:
            raise InvalidInput("the URL names no bucket", hint="Write couchbase://host/bucket, or give --bucket")
        tls = login.tls_context(where)
        credentials = login.needed_credentials(where)
        logins.append(Login(credentials=credentials, bucket=chosen, tls=tls, features=PEER_FEATURES))
        addresses.append(where.addresses[0])
    if (addresses[0], logins[0].bucket) == (addresses[1], logins[1].bucket):
        raise InvalidInput("--from and --to are the same bucket of the same node", hint="Name two nodes")
    job = _Job(
        source=addresses[0],
        target=addresses[1],
        source_login=logins[0],
        target_login=logins[1],
        vbuckets=None if asked.vbuckets is None else _parsed(asked.vbuckets),
        asked=asked,
    )
    asyncio.run(_run(job))


def _parsed(text: str) -> list[VBucketId]:
    vbuckets: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidInput(f"{part.strip()!r} is not a vbucket", hint="Write numbers and ranges, such as 0-15,20")
        numbers = range(int(first), int(last if dash else first) + 1)
        if not numbers or numbers[-1] > _VBUCKET_MAX:
            raise InvalidInput(
                f"{part.strip()!r} is not a valid range of vbuckets", hint=f"Use vbuckets from 0 to {_VBUCKET_MAX}"
            )
        vbuckets |= dict.fromkeys(numbers)
    return [VBucketId(vbucket) for vbucket in vbuckets]


async def _run(job: _Job) -> None:
    vbuckets = job.vbuckets if job.vbuckets is not None else await _active_vbuckets(job)
    proxy = await Proxy.open(
        job.source, job.target, source_login=job.source_login, target_login=job.target_login, name=job.asked.name
    )
    shown = asyncio.create_task(_show(proxy, len(vbuckets)))
    try:
        for at in range(0, len(vbuckets), _STREAMS_OPENING):
            together = vbuckets[at : at + _STREAMS_OPENING]
            await asyncio.gather(*(_add_stream(proxy, job, vbucket) for vbucket in together))
        reasons = await asyncio.gather(*(proxy.wait_for_end(vbucket) for vbucket in vbuckets))
        failed = [vbucket for vbucket, reason in zip(vbuckets, reasons, strict=True) if reason != StreamEndReason.OK]
        if failed:
            raise HeadwaterError(
                f"{counted(len(failed), 'stream')} ended too soon, the first for vbucket {failed[0]}",
                hint="Check where the vbuckets are active now",
            )
        # Before the connections are closed: changes that the target has not read by then would be lost.
        await _wait_until_persisted(job, proxy)
    finally:
        shown.cancel()
        proxy.close()
    changes = sum(stream.changes for stream in proxy.streams.values())
    verb = "handed over" if StreamFlags.TAKEOVER in job.asked.flags else "copied"
    members = {"vbuckets": len(vbuckets), "changes": changes, "bytes": proxy.passed_bytes}
    sentence = f"{counted(len(vbuckets), 'vbucket')} {verb}, {counted(changes, 'change')}"
    click.echo(json.dumps(members) if job.asked.as_json else sentence)


async def _wait_until_persisted(job: _Job, proxy: Proxy) -> None:
    """Wait until the target has persisted, for every vbucket, everything that was forwarded to it."""
    connection = await AsyncKvConnection.open(job.target, job.target_login)
    behind, seqnos = list(proxy.streams.values()), dict.fromkeys(proxy.streams, 0)
    loop = asyncio.get_running_loop()
    moved_s = loop.time()
    try:
        while True:
            asked = connection.send(ObserveSeqno(vbucket=stream.vbucket, vbuuid=stream.vbuuid) for stream in behind)
            answers = [(await answer)[-1].result() for answer in asked]
            still_behind = []
            for stream, answer in zip(behind, answers, strict=True):
                # A vbucket that does not exist there, or is on another branch of history, has persisted none of it.
                observed = answer if isinstance(answer, ObserveSeqnoResponse) else None
                if observed is not None and observed.persisted_seqno > seqnos[stream.vbucket]:
                    seqnos[stream.vbucket], moved_s = observed.persisted_seqno, loop.time()
                if observed is None or not stream.is_persisted_at(observed):
                    still_behind.append(stream)
            behind = still_behind
            if not behind:
                return
            proxy.check()
            if loop.time() - moved_s > _STUCK_S_MAX:
                first = behind[0]
                raise HeadwaterError(
                    f"--to has not persisted all of {counted(len(behind), 'vbucket')}: the first is vbucket "
                    f"{first.vbucket}, at seqno {seqnos[first.vbucket]} of {first.seqno}",
                    hint="Check the log of --to, then run the command again: it resumes where --to is",
                )
            await asyncio.sleep(_ASK_EVERY_S)
    finally:
        connection.close()


async def _add_stream(proxy: Proxy, job: _Job, vbucket: VBucketId) -> None:
    try:
        await proxy.add_stream(vbucket, job.asked.flags)
    except StatusError as error:
        status = Status(error.status)
        reason, hint = _REFUSALS.get(status, (f"the answer is {status.name}", error.hint))
        raise HeadwaterError(f"vbucket {vbucket} can't be replicated: {reason}", hint=hint) from error


_REFUSALS = {
    Status.NOT_MY_VBUCKET: (
        "it is not active at --from, or no replica at --to",
        "Name those that are with --vbuckets, or make them replicas first",
    ),
    Status.KEY_EEXISTS: ("--to gets it from elsewhere already", "Stop that first"),
}


async def _active_vbuckets(job: _Job) -> list[VBucketId]:
    """Return the vbuckets that are active on the source, according to its cluster map."""
    connection = await AsyncKvConnection.open(job.source, job.source_login)
    connection.close()
    config = connection.outcome.cluster_config
    if config is None:
        raise InvalidInput("the node does not say which vbuckets it has", hint="Give them with --vbuckets")
    found = ClusterMap.decode(config, asked=job.source, tls=job.source_login.tls is not None)
    here = [at for at, address in enumerate(found.nodes) if address == job.source]
    return [VBucketId(vbucket) for vbucket in range(found.vbuckets) if not here or found.active_node(vbucket) in here]


async def _show(proxy: Proxy, total: int) -> None:
    """On a terminal, show the progress in one line that is redrawn."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    with console.status("") as line:
        while True:
            changes = sum(stream.changes for stream in proxy.streams.values())
            ended = sum(stream.ended.done() for stream in proxy.streams.values())
            line.update(f"{len(proxy.streams)} of {total} streams, {ended} ended, {counted(changes, 'change')}")
            await asyncio.sleep(_SHOW_EVERY_S)
