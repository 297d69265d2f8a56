"""`headwater cluster`: make nodes a cluster, spread its vbuckets, and go on when a node is lost.

Each command finds the cluster by its URL, runs one operation of a `Coordinator` and prints what it has done.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import rich_click as click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from headwater.cli.options import LoginOptions, connection_options, errors_reported, json_option
from headwater.cli.output import output_console
from headwater.client.connection_string import (
    KV_PORT,
    KV_TLS_PORT,
    Address,
    ConnectionString,
    find_hosts,
    parse_address,
)
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.cluster.nodes import ClusterStatus
from headwater.cluster.planning import REPLICAS_MAX
from headwater.cluster.rebalance import OnProgress, Rebalanced, RebalanceProgress
from headwater.errors import InvalidInput
from headwater.node.membership import PEER_FEATURES
from headwater.phrases import counted

_REBALANCE = "run `headwater cluster rebalance`"

T = TypeVar("T")
Work = Callable[[Coordinator], Awaitable[T]]


class _Cluster:
    """The cluster that a URL names, for one command."""

    def __init__(self, seeds: list[Address], login: Login, *, as_json: bool) -> None:
        self.seeds = seeds
        self.as_json = as_json
        self._login = login

    @property
    def default_port(self) -> int:
        return KV_PORT if self._login.tls is None else KV_TLS_PORT

    def run(self, work: Work[T], *, seeds: list[Address] | None = None) -> T:
        with _progress(is_shown=not self.as_json) as report:
            return asyncio.run(self._run(work, seeds or self.seeds, report))

    async def _run(self, work: Work[T], seeds: list[Address], report: OnProgress) -> T:
        coordinator = Coordinator(seeds, self._login, report=report)
        try:
            return await work(coordinator)
        finally:
            coordinator.close()

    def report(self, sentence: str, **members: Any) -> None:
        click.echo(json.dumps(members) if self.as_json else sentence)


@contextmanager
def _progress(*, is_shown: bool) -> Iterator[OnProgress]:
    """A bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield lambda progress: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking at the nodes", total=None)

        def report(progress: RebalanceProgress) -> None:
            bar.update(task, description=progress.phase, completed=progress.done, total=progress.total)

        yield report


def _on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the cluster of its URL, and all options that it takes to get there."""

    @click.argument("url", metavar="URL")
    @connection_options
    @json_option
    @errors_reported
    @functools.wraps(command)
    def wrapped(
        url: str,
        login: LoginOptions,
        as_json: bool,
        **rest: Any,
    ) -> None:
        where = ConnectionString.parse(url)
        if where.bucket is None:
            raise InvalidInput("the URL names no bucket", hint="Write couchbase://host/bucket")
        to_nodes = Login(
            credentials=login.needed_credentials(where),
            bucket=where.bucket,
            tls=login.tls_context(where),
            features=PEER_FEATURES,
            agent="headwater cluster",
        )
        command(_Cluster(list(find_hosts(where)), to_nodes, as_json=as_json), **rest)

    return wrapped


@click.group()
def cluster() -> None:
    """Make nodes a cluster, spread its vbuckets, and go on when a node is lost.

    URL is couchbase://host[:port][,host2…]/bucket; any node of the cluster will do. NODE is the host:port of a node's
    key-value side, as `cluster status` shows it. The user must be an admin, with the same password on all nodes. A
    command that was cut short is run again: what is known is kept by the nodes.

    \b
    Examples:
      headwater cluster init couchbase://127.0.0.1:11210/default --replicas 1
      headwater cluster add couchbase://127.0.0.1:11210/default 127.0.0.1:11310 \\
        --rebalance
      headwater cluster status couchbase://127.0.0.1/default
      headwater cluster failover couchbase://127.0.0.1/default 127.0.0.1:11310
    """


@cluster.command()
@_on_cluster
@click.option(
    "--replicas",
    type=click.IntRange(0, REPLICAS_MAX),
    default=1,
    show_default=True,
    help="Copies of each vbucket beside the active one.",
)
def init(on: _Cluster, replicas: int) -> None:
    """Make the nodes of URL a cluster.

    With several nodes in URL, the first may have documents; the others must be empty, and get their share at once.

    \b
    Examples:
      headwater cluster init couchbase://127.0.0.1/default
      headwater cluster init couchbase://10.0.0.1,10.0.0.2,10.0.0.3/default \\
        --replicas 2
    """

    async def work(coordinator: Coordinator) -> ClusterStatus:
        config = await coordinator.init(replicas=replicas)
        if not config.settled and len(config.nodes) > 1:
            await coordinator.rebalance()
        return await coordinator.status()

    status = on.run(work)
    nodes, copies = counted(len(status.nodes), "node"), counted(replicas, "replica")
    on.report(f"bucket {status.bucket} is a cluster of {nodes} with {copies}", **_as_members(status))


@cluster.command()
@_on_cluster
def status(on: _Cluster) -> None:
    """Show the nodes and what each has.

    \b
    Example:
      headwater cluster status couchbase://127.0.0.1/default
    """
    found = on.run(lambda coordinator: coordinator.status())
    if on.as_json:
        click.echo(json.dumps(_as_members(found)))
        return
    _show(found)


@cluster.command()
@_on_cluster
@click.argument("node", metavar="NODE")
@click.option("--rebalance", "rebalances", is_flag=True, help="Give it its share of the vbuckets at once.")
@click.option("--force", is_flag=True, help="Also if it has documents of its own, which are gone then.")
def add(on: _Cluster, node: str, rebalances: bool, force: bool) -> None:
    """Take a node into the cluster, or take it back after a failover.

    It must have the bucket, with as many vbuckets. What it has had alone since it was failed over is rolled back.

    \b
    Example:
      headwater cluster add couchbase://127.0.0.1/default 127.0.0.1:11310 \\
        --rebalance
    """
    address = parse_address(node, default_port=on.default_port)

    async def work(coordinator: Coordinator) -> ClusterStatus:
        await coordinator.add(address, force=force)
        if rebalances:
            await coordinator.rebalance()
        return await coordinator.status()

    found = on.run(work)
    then = "" if rebalances else "; it gets vbuckets with `headwater cluster rebalance`"
    on.report(f"{address} is one of {counted(len(found.nodes), 'node')}{then}", **_as_members(found))


@cluster.command()
@_on_cluster
def rebalance(on: _Cluster) -> None:
    """Spread the vbuckets over all nodes. Clients go on reading and writing meanwhile.

    \b
    Example:
      headwater cluster rebalance couchbase://127.0.0.1/default
    """
    done = on.run(lambda coordinator: coordinator.rebalance())
    on.report(_moved(done), **asdict(done))


@cluster.command()
@_on_cluster
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also if vbuckets are lost with it. They begin again, empty.")
def failover(on: _Cluster, nodes: tuple[str, ...], force: bool) -> None:
    """Go on without nodes that are gone: their vbuckets become active elsewhere.

    What a lost node had and no other is gone, unless it was written with durability. Bring the node back with `cluster
    add`, and make the missing copies with `cluster rebalance`.

    \b
    Example:
      headwater cluster failover couchbase://127.0.0.1/default 127.0.0.1:11310
    """
    lost = [str(parse_address(node, default_port=on.default_port)) for node in nodes]
    done = on.run(lambda coordinator: coordinator.failover(lost, force=force))
    sentence = f"{', '.join(done.nodes)} failed over: {counted(done.promoted, 'vbucket')} promoted, {done.losses()}"
    if done.lost:
        empty = ", ".join(str(vbucket) for vbucket in done.lost)
        sentence += f"; {counted(len(done.lost), 'vbucket')} had no copy and began again, empty: {empty}"
    on.report(sentence, **asdict(done))


@cluster.command()
@_on_cluster
@click.argument("node", metavar="NODE")
def remove(on: _Cluster, node: str) -> None:
    """Move everything away from a node, and let it leave the cluster.

    \b
    Example:
      headwater cluster remove couchbase://127.0.0.1/default 127.0.0.1:11310
    """
    name = str(parse_address(node, default_port=on.default_port))
    done = on.run(lambda coordinator: coordinator.remove(name))
    on.report(f"{name} has left: {_moved(done)}", **asdict(done))


@cluster.command("renew-login")
@_on_cluster
def renew_login(on: _Cluster) -> None:
    """Have the nodes log in to each other with a new secret.

    Machines that have left the cluster, and users who were admins, may know the old one. All nodes must run. A node
    that was failed over and is not back can't hear any more that it is out: start it on an empty data folder.

    \b
    Example:
      headwater cluster renew-login couchbase://127.0.0.1/default
    """
    config = on.run(lambda coordinator: coordinator.renew_login())
    nodes = counted(len(config.nodes), "node")
    on.report(f"{nodes} log in to each other with a new secret", nodes=list(config.names()), revision=config.revision)


# --- showing ------------------------------------------------------------------------------------------------------


def _moved(done: Rebalanced) -> str:
    built = counted(done.built, "copy", plural="copies")
    return f"{counted(done.handed_over, 'vbucket')} handed over, {built} built"


def _as_members(status: ClusterStatus) -> dict[str, Any]:
    return asdict(status)


def _show(status: ClusterStatus) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("NODE", "HTTP"):
        # Users copy the address into `cluster failover`.
        table.add_column(heading, no_wrap=True)
    for heading in ("ACTIVE", "REPLICA", "BUILDING", "BEHIND"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("")
    for node in status.nodes:
        numbers = (str(number) for number in (node.active, node.replica, node.building, node.behind))
        table.add_row(node.name, node.http, *numbers, "" if node.is_reachable else "[red]can't be reached[/red]")
    console = output_console()
    console.print(
        f"bucket {status.bucket}, {counted(status.vbuckets, 'vbucket')} with {counted(status.replicas, 'replica')}, "
        f"config {status.revision}",
        soft_wrap=True,
    )
    console.print(table)
    for sentence in _remarks(status):
        console.print(sentence, soft_wrap=True)


def _remarks(status: ClusterStatus) -> Iterator[str]:
    """What is not as it shall be."""
    if status.orphans:
        yield f"no node has {counted(status.orphans, 'vbucket')}"
    if status.disagreeing:
        nodes = ", ".join(status.disagreeing)
        yield f"{nodes}: another config, left by commands that ran at the same time: {_REBALANCE}"
    if status.missing:
        yield f"{counted(status.missing, 'replica')} missing: {_REBALANCE}"
    elif not status.settled:
        yield f"vbuckets are not where they shall be: {_REBALANCE}"
