"""`headwater cluster`: form a cluster, distribute its vbuckets, and fail over lost nodes.

Each command finds the cluster by its URL, runs one operation of a `Coordinator` and prints the result.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from headwater.cli import options, supervising
from headwater.cli.output import click, output_console
from headwater.client import connection_string
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.cluster.nodes import ClusterStatus
from headwater.cluster.planning import REPLICAS_MAX
from headwater.cluster.rebalance import OnProgress, Rebalanced, RebalanceProgress
from headwater.errors import InvalidInput
from headwater.node.membership import PEER_FEATURES
from headwater.phrases import counted

_REBALANCE = "run `headwater cluster rebalance`"

RESTART_S_MAX = 150.0
"""How long a node may take to get ready. Its supervisor gives up earlier, and reports why."""

T = TypeVar("T")
Work = Callable[[Coordinator], Awaitable[T]]


class _Cluster:
    """The cluster that a URL names, for one command."""

    def __init__(self, seeds: list[connection_string.Address], login: Login, *, as_json: bool) -> None:
        self.seeds = seeds
        self.as_json = as_json
        self._login = login

    @property
    def default_port(self) -> int:
        return connection_string.KV_PORT if self._login.tls is None else connection_string.KV_TLS_PORT

    def run(self, work: Work[T], *, seeds: list[connection_string.Address] | None = None) -> T:
        with _progress(is_shown=not self.as_json) as report:
            return asyncio.run(self._run(work, seeds or self.seeds, report))

    async def _run(self, work: Work[T], seeds: list[connection_string.Address], report: OnProgress) -> T:
        coordinator = Coordinator(seeds, self._login, report=report)
        try:
            return await work(coordinator)
        finally:
            coordinator.close()

    def report(self, sentence: str, **members: Any) -> None:
        click.echo(json.dumps(members) if self.as_json else sentence)


@contextmanager
def _progress(*, is_shown: bool) -> Iterator[OnProgress]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
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
    """Give a command the cluster that its URL names, and the connection options."""

    @click.argument("url", metavar="URL")
    @options.connection_options
    @options.json_option
    @options.errors_reported
    @functools.wraps(command)
    def wrapped(
        url: str,
        login: options.LoginOptions,
        as_json: bool,
        **rest: Any,
    ) -> None:
        where = connection_string.ConnectionString.parse(url)
        if where.bucket is None:
            raise InvalidInput("the URL names no bucket", hint="Write couchbase://host/bucket")
        to_nodes = Login(
            credentials=login.needed_credentials(where),
            bucket=where.bucket,
            tls=login.tls_context(where),
            features=PEER_FEATURES,
            agent="headwater cluster",
        )
        command(_Cluster(list(connection_string.find_hosts(where)), to_nodes, as_json=as_json), **rest)

    return wrapped


@click.group()
def cluster() -> None:
    """Form a cluster, distribute its vbuckets, and fail over lost nodes.

    URL is couchbase://host[:port][,host2…]/bucket; any node of the cluster works. NODE is the host:port of a node's
    key-value port, as `cluster status` shows it. The user must be an admin, with the same password on all nodes. If a
    command is interrupted, run it again: the nodes keep the state.

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
    help="Replicas of each vbucket.",
)
def init(on: _Cluster, replicas: int) -> None:
    """Form a cluster of the nodes in URL.

    With several nodes in URL, the first may have documents; the others must be empty, and get their share of the
    vbuckets immediately.

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
    on.report(f"bucket {status.bucket} is a cluster of {nodes} with {copies}", **asdict(status))


@cluster.command()
@_on_cluster
def status(on: _Cluster) -> None:
    """Show the nodes and the vbuckets of each.

    The exit code is 4 if a vbucket has no active copy that can be reached, 3 if a node can't be reached but every
    vbucket has its active copy on another one, and 1 if no node answers.

    \b
    Example:
      headwater cluster status couchbase://127.0.0.1/default
    """
    found = on.run(lambda coordinator: coordinator.status())
    if on.as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        _show(found)
    if found.copies.unserved:
        sys.exit(options.EXIT_CRITICAL)
    if not all(node.is_reachable for node in found.nodes):
        sys.exit(options.EXIT_WARNING)


@cluster.command()
@_on_cluster
@click.argument("node", metavar="NODE")
@click.option("--rebalance", "rebalances", is_flag=True, help="Move its share of the vbuckets to it immediately.")
@click.option("--force", is_flag=True, help="Add it even if it has documents, which are deleted.")
def add(on: _Cluster, node: str, rebalances: bool, force: bool) -> None:
    """Add a node to the cluster, or add it again after a failover.

    The node must have the bucket, with the same number of vbuckets. It rolls back changes that only it had when it was
    failed over.

    \b
    Example:
      headwater cluster add couchbase://127.0.0.1/default 127.0.0.1:11310 \\
        --rebalance
    """
    address = connection_string.parse_address(node, default_port=on.default_port)

    async def work(coordinator: Coordinator) -> ClusterStatus:
        await coordinator.add(address, force=force)
        if rebalances:
            await coordinator.rebalance()
        return await coordinator.status()

    found = on.run(work)
    then = "" if rebalances else "; it gets vbuckets with `headwater cluster rebalance`"
    on.report(f"{address} is one of {counted(len(found.nodes), 'node')}{then}", **asdict(found))


@cluster.command()
@_on_cluster
def rebalance(on: _Cluster) -> None:
    """Distribute the vbuckets over all nodes. Clients keep reading and writing in the meantime.

    \b
    Example:
      headwater cluster rebalance couchbase://127.0.0.1/default
    """
    done = on.run(lambda coordinator: coordinator.rebalance())
    on.report(_moved(done), **asdict(done))


@cluster.command()
@_on_cluster
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Fail over even if vbuckets are lost. They start again, empty.")
def failover(on: _Cluster, nodes: tuple[str, ...], force: bool) -> None:
    """Continue without lost nodes: their vbuckets become active elsewhere.

    Changes that only a lost node had are gone; durable writes survive. Bring the node back with `cluster add`, and
    create the missing copies with `cluster rebalance`.

    \b
    Example:
      headwater cluster failover couchbase://127.0.0.1/default 127.0.0.1:11310
    """
    lost = [str(connection_string.parse_address(node, default_port=on.default_port)) for node in nodes]
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
    """Move all vbuckets away from a node, and remove it from the cluster.

    \b
    Example:
      headwater cluster remove couchbase://127.0.0.1/default 127.0.0.1:11310
    """
    name = str(connection_string.parse_address(node, default_port=on.default_port))
    done = on.run(lambda coordinator: coordinator.remove(name))
    on.report(f"{name} has left: {_moved(done)}", **asdict(done))


@cluster.command("renew-login")
@_on_cluster
def renew_login(on: _Cluster) -> None:
    """Generate a new secret with which the nodes log in to each other.

    Machines that have left the cluster, and former admins, may know the old one. All nodes must be running. A node that
    was failed over and is not back can no longer learn that it was removed: start it on an empty data folder.

    \b
    Example:
      headwater cluster renew-login couchbase://127.0.0.1/default
    """
    config = on.run(lambda coordinator: coordinator.renew_login())
    nodes = counted(len(config.nodes), "node")
    on.report(f"{nodes} log in to each other with a new secret", nodes=list(config.names()), revision=config.revision)


@cluster.command("restart-node")
@click.argument("data", metavar="DIRECTORY", type=click.Path(path_type=Path))
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@options.json_option
@options.errors_reported
def restart_node(data: Path, nodes: tuple[str, ...], as_json: bool) -> None:
    """Start nodes of `headwater serve --nodes` that have ended, on this machine.

    DIRECTORY is the data folder that `serve` has printed, and NODE the host:port of a node's key-value port. The
    command returns when the node is ready. A node that was not failed over continues with its data; a failed-over one
    needs `cluster add`. On other machines, start nodes as you did the first time.

    \b
    Example:
      headwater cluster restart-node /tmp/cluster 127.0.0.1:11310
    """
    for node in nodes:
        address = connection_string.parse_address(node, default_port=connection_string.KV_PORT)
        supervising.restart_node(data, address, within_s=RESTART_S_MAX)
        click.echo(json.dumps({"node": str(address)}) if as_json else f"{address} is running again")


# --- showing ------------------------------------------------------------------------------------------------------


def _moved(done: Rebalanced) -> str:
    built = counted(done.built, "copy", plural="copies")
    return f"{counted(done.handed_over, 'vbucket')} handed over, {built} built"


def _show(status: ClusterStatus) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("NODE", "HTTP"):
        # Users copy the address into `cluster failover`.
        table.add_column(heading, no_wrap=True)
    for heading in ("ACTIVE", "REPLICA", "BUILDING", "BEHIND"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("")
    for node in status.nodes:
        numbers = [str(number) for number in (node.active, node.replica, node.building)]
        behind = str(node.behind) if node.is_reachable else "?"
        table.add_row(
            node.name, node.http, *numbers, behind, "" if node.is_reachable else "[red]can't be reached[/red]"
        )
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
    """Yield what is wrong with the cluster."""
    if status.copies.active_unreachable:
        vbuckets = counted(status.vbuckets, "vbucket")
        yield f"no node that can be reached has the active copy of {status.copies.active_unreachable:,} of {vbuckets}"
    if unknown := sum(node.unknown for node in status.nodes):
        yield f"of {counted(unknown, 'replica')} it is unknown how far they are"
    if status.orphans:
        yield f"no node has {counted(status.orphans, 'vbucket')}"
    if status.disagreeing:
        nodes = ", ".join(status.disagreeing)
        yield f"{nodes}: another config, left by commands that ran at the same time: {_REBALANCE}"
    if status.missing:
        yield f"{counted(status.missing, 'replica')} missing: {_REBALANCE}"
    elif not status.settled:
        yield f"vbuckets are not where they shall be: {_REBALANCE}"
