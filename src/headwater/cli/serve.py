"""`headwater serve`: run a node."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

import rich_click as click
import uvloop

from headwater.cli.options import EXIT_FAILED
from headwater.cli.output import FORMATS, LEVELS, set_up_logging
from headwater.cli.serving_nodes import (
    NODES_MAX,
    ClusterOptions,
    names_first_user_only,
    run_nodes,
    stop_with_supervisor,
)
from headwater.cluster.coordinator import CoordinationForNodes
from headwater.errors import HeadwaterError
from headwater.log_fields import LogEvent, fields
from headwater.node.node import Node, Started
from headwater.node.node_folder import keep_freed_memory
from headwater.node.options import SCRUB_BYTES_PER_S, VBUCKETS, NodeOptions, ServerLimits
from headwater.protocol.dialects import DIALECTS, NEWEST
from headwater.store.compaction import Retention

logger = logging.getLogger(__name__)

GIVE_UP_S = 1.0
"""How long a start that is to end gets for a clean end of its own."""


def default_data_folder() -> Path:
    """In the user's folder for data, as the XDG base directory specification has it. It was in the folder for settings
    once, and data that is there and nowhere else is still found."""
    earlier = Path(click.get_app_dir("headwater")) / "data"
    if sys.platform == "darwin":
        return earlier  # there both folders are one
    named = os.environ.get("XDG_DATA_HOME", "")
    # The specification has relative paths ignored.
    home = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "share"
    folder = home / "headwater" / "data"
    return earlier if earlier.exists() and not folder.exists() else folder


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the data lies. [default: headwater/data in your folder for data, ~/.local/share]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--advertise-host", help="The name clients reach the node by, where it differs from --host.")
@click.option("--advertise-port", type=click.IntRange(1, 65535), help="The port they reach it by, if not --port.")
@click.option("--advertise-http-port", type=click.IntRange(1, 65535), help="The same for --http-port.")
@click.option("--advertise-tls-port", type=click.IntRange(1, 65535), help="The same for --tls-port.")
@click.option("--advertise-http-tls-port", type=click.IntRange(1, 65535), help="The same for --http-tls-port.")
@click.option("--port", type=click.IntRange(0, 65535), help="Key-value port; 0 for a free one. [default: 11210]")
@click.option("--http-port", type=click.IntRange(0, 65535), help="HTTP port; 0 for a free one. [default: 8091]")
@click.option("--tls-port", type=click.IntRange(0, 65535), help="The same with TLS. [default: 11207]")
@click.option("--http-tls-port", type=click.IntRange(0, 65535), help="The same with TLS. [default: 18091]")
@click.option("--upr-port", type=click.IntRange(0, 65535), help="Serve the UPR draft on this port; 0 for a free one.")
@click.option("--upr-bucket", help="The bucket that it streams. [default: the first one]")
@click.option("--bucket", "buckets", multiple=True, help="A bucket to serve; repeat for more. [default: default]")
@click.option("--vbuckets", default=VBUCKETS, show_default=True, help="Vbuckets of a new bucket, a power of two.")
@click.option("--bare", is_flag=True, help="Start with no vbuckets: they come by set-vbucket.")
@click.option(
    "--user",
    envvar="HEADWATER_USER",
    help="A user with all rights, made or given a new password. By the variable only the first user is made.",
)
@click.option("--password", envvar="HEADWATER_PASSWORD", help="Its password.")
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Certificate, PEM.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Its key, PEM.")
@click.option("--tls-only", is_flag=True, help="With TLS, have no ports without it beside.")
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen beyond loopback without TLS; with a certificate, on ports without TLS beside those that have it.",
)
@click.option(
    "--speaks-as",
    type=click.Choice(list(DIALECTS)),
    default=next(name for name, dialect in DIALECTS.items() if dialect is NEWEST),
    show_default=True,
    help="The version of Couchbase whose answers the node gives, where versions differ.",
)
@click.option("--cluster-name", metavar="NAME", help="What clients call the cluster. [default: as it is, or headwater]")
@click.option(
    "--durability",
    type=click.Choice(["disk", "memory"]),
    default="disk",
    show_default=True,
    help="When a write is answered: once it is on disk, or at once.",
)
@click.option(
    "--durable-alone",
    is_flag=True,
    help="Take durable writes of buckets made over REST whose replicas no node has; they are refused otherwise.",
)
@click.option(
    "--history-seconds", default=Retention().history_s, show_default=True, help="How long superseded versions are kept."
)
@click.option(
    "--history-bytes",
    default=Retention().history_bytes,
    show_default=True,
    help="What a vbucket keeps of them at most.",
)
@click.option(
    "--purge-age-seconds", default=Retention().purge_age_s, show_default=True, help="How long deletions are kept."
)
@click.option("--expiry-interval", default=60.0, show_default=True, help="Seconds between looks for expired documents.")
@click.option("--compact-interval", default=10.0, show_default=True, help="Seconds between looks for what to compact.")
@click.option(
    "--scrub-bytes-per-second",
    type=click.IntRange(min=0),
    default=SCRUB_BYTES_PER_S,
    show_default=True,
    help="How fast stored data is read in search of damage; 0 for not at all.",
)
@click.option(
    "--connections-max",
    default=ServerLimits().connections_max,
    show_default=True,
    help="Connections at one time; further ones are closed at once.",
)
@click.option(
    "--auth-seconds", default=ServerLimits().auth_s, show_default=True, help="How long a peer may take to log in."
)
@click.option(
    "--idle-seconds", default=ServerLimits().idle_s, show_default=True, help="How long a peer may say nothing."
)
@click.option(
    "--unsent-bytes-max",
    default=ServerLimits().unsent_bytes_max,
    show_default=True,
    help="Answers a peer may leave unread before it is read from no more.",
)
@click.option(
    "--stalled-seconds", default=ServerLimits().stalled_s, show_default=True, help="How long it may leave them unread."
)
@click.option(
    "--pending-bytes-max",
    default=ServerLimits().pending_bytes_max,
    show_default=True,
    help="What one connection may have written that is not on disk yet, before its next writes wait.",
)
@click.option(
    "--node-pending-bytes-max",
    default=ServerLimits().node_pending_bytes_max,
    show_default=True,
    help="The same for all connections together.",
)
@click.option(
    "--node-buffer-bytes-max",
    default=ServerLimits().node_buffer_bytes_max,
    show_default=True,
    help="Unfinished requests and unread answers of all peers; beyond that the slowest peer is dropped.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="The log on standard error: lines for people, or a JSON object each for programs.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    show_default=True,
    help="The least that is logged. DCP connections that come and go are info. With --nodes and no --log-format json, "
    "nodes log from warning on unless this is given.",
)
@click.option("--open-metrics", is_flag=True, help="Let /metrics be read without a log-in.")
@click.option(
    "--http-host", multiple=True, metavar="NAME", help="A name that HTTP requests may be for; repeat for more."
)
@click.option("--landing-metrics", multiple=True, metavar="URL", help="Show this landing's lag on the dashboard.")
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), help="Run a cluster of so many nodes on this machine.")
@click.option(
    "--replicas", type=click.IntRange(0, 3), default=1, show_default=True, help="Copies of each vbucket there."
)
@click.pass_context
def serve(
    context: click.Context,
    data: Path | None,
    host: str,
    advertise_host: str | None,
    advertise_port: int | None,
    advertise_http_port: int | None,
    advertise_tls_port: int | None,
    advertise_http_tls_port: int | None,
    port: int | None,
    http_port: int | None,
    tls_port: int | None,
    http_tls_port: int | None,
    upr_port: int | None,
    upr_bucket: str | None,
    buckets: tuple[str, ...],
    vbuckets: int,
    bare: bool,
    user: str | None,
    password: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_only: bool,
    insecure: bool,
    speaks_as: str,
    cluster_name: str | None,
    durability: str,
    durable_alone: bool,
    history_seconds: int,
    history_bytes: int,
    purge_age_seconds: int,
    expiry_interval: float,
    compact_interval: float,
    scrub_bytes_per_second: int,
    connections_max: int,
    auth_seconds: float,
    idle_seconds: float,
    unsent_bytes_max: int,
    stalled_seconds: float,
    pending_bytes_max: int,
    node_pending_bytes_max: int,
    node_buffer_bytes_max: int,
    as_json: bool,
    log_format: str,
    log_level: str,
    open_metrics: bool,
    http_host: tuple[str, ...],
    landing_metrics: tuple[str, ...],
    nodes: int | None,
    replicas: int,
) -> None:
    """Run a node that Couchbase applications can write to.

    With no options it listens on loopback, serves one bucket `default`, keeps its data in your data folder and makes
    a password, which it shows once. It prints where that folder is. A port that another program has is refused.

    With --tls-cert and --tls-key it has ports with TLS beside the plain ones, as Couchbase has them, on loopback and
    with --insecure. Otherwise, and with --tls-only, all its ports have TLS, and --port and --http-port name those.

    SIGTERM and Ctrl-C are a clean stop, with exit code 0. It is 1 where the node can't start, and 2 for a wrong command
    line.

    \b
    Examples:
      headwater serve
      headwater serve --data /tmp/demo --bucket travel --user me --password secret
      headwater serve --port 0 --http-port 0 --json
      headwater serve --data /tmp/cluster --nodes 4 --replicas 1
    """
    set_up_logging(log_format, level=log_level)
    try:
        if nodes is not None:
            uvloop.run(run_nodes(ClusterOptions.of(context, data or default_data_folder())))
            return
        options = NodeOptions(
            data=data or default_data_folder(),
            host=host,
            advertise_host=advertise_host,
            advertise_port=advertise_port,
            advertise_http_port=advertise_http_port,
            advertise_tls_port=advertise_tls_port,
            advertise_http_tls_port=advertise_http_tls_port,
            port=port,
            http_port=http_port,
            tls_port=tls_port,
            http_tls_port=http_tls_port,
            upr_port=upr_port,
            upr_bucket=upr_bucket,
            buckets=buckets or ("default",),
            vbuckets=vbuckets,
            bare=bare,
            user=user,
            password=password,
            first_user_only=names_first_user_only(context),
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_only=tls_only,
            insecure=insecure,
            dialect=DIALECTS[speaks_as],
            cluster_name=cluster_name,
            ack_when_durable=durability == "disk",
            retention=Retention(history_s=history_seconds, history_bytes=history_bytes, purge_age_s=purge_age_seconds),
            expiry_every_s=expiry_interval,
            compact_every_s=compact_interval,
            durable_alone=durable_alone,
            scrub_bytes_per_s=scrub_bytes_per_second,
            limits=ServerLimits(
                connections_max=connections_max,
                auth_s=auth_seconds,
                idle_s=idle_seconds,
                unsent_bytes_max=unsent_bytes_max,
                stalled_s=stalled_seconds,
                pending_bytes_max=pending_bytes_max,
                node_pending_bytes_max=node_pending_bytes_max,
                node_buffer_bytes_max=node_buffer_bytes_max,
            ),
            open_metrics=open_metrics,
            http_hosts=http_host,
            landing_urls=landing_metrics,
        )
        keep_freed_memory()
        uvloop.run(_run(options, as_json=as_json, log_format=log_format))
    except HeadwaterError as error:
        if log_format == "json":
            about = fields(event=LogEvent.NODE_FAILED, error=type(error).__name__, reason=error.reason)
            logger.error("%s", error, extra=about)
            sys.exit(EXIT_FAILED)
        raise click.ClickException(str(error)) from error


async def _run(options: NodeOptions, *, as_json: bool, log_format: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stop_with_supervisor(stop.set)
    node = Node(options, coordination=CoordinationForNodes())
    started = await _start(node, stop)
    if started is None:
        return
    if log_format == "json":
        _log_ready(started, options)
    elif not as_json:
        _print_more(started, options)
    _announce(started, options, as_json=as_json)
    await stop.wait()
    await node.stop()


async def _start(node: Node, stop: asyncio.Event) -> Started | None:
    """Start the node; None where it was to stop before it was ready."""
    starting = asyncio.create_task(node.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        stopping.cancel()
        return await starting
    starting.cancel()
    await asyncio.wait({starting}, timeout=GIVE_UP_S)
    if starting.done():
        return None
    # A thread compiles, or loads a large bucket, and can't be ended. Nothing is lost: a kernel is kept when it is
    # complete, and a bucket that was left in order stays so until it is loaded.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _announce(started: Started, options: NodeOptions, *, as_json: bool) -> None:
    """The one line on standard output that says the node is ready."""
    if not as_json:
        click.echo(" ".join(["ready", started.url, *filter(None, [started.plain_url])]))
        return
    line: dict[str, object] = {"ready": started.url, "http": started.http_url}
    if started.plain_url is not None:
        line |= {"plain": started.plain_url, "plain_http": started.plain_http_url}
    line |= {"user": started.user, "data": str(options.data), "buckets": list(started.buckets)}
    if started.upr_address is not None:
        line["upr"] = started.upr_address
    if started.generated_password is not None:
        line["password"] = started.generated_password
    click.echo(json.dumps(line))


def _print_more(started: Started, options: NodeOptions) -> None:
    """For a user at a terminal: where data and dashboard are, and, once, the password that was made."""
    click.echo(f"data {options.data}", err=True)
    if started.generated_password is not None:
        click.echo(
            f"user {started.user}, password {started.generated_password} (kept in {options.data / 'password'})",
            err=True,
        )
    if started.upr_address is not None:
        click.echo(f"UPR draft on {started.upr_address}, with no log-in", err=True)
    plain = "" if started.plain_http_url is None else f", without TLS {started.plain_http_url}/ui/"
    click.echo(f"dashboard {started.http_url}/ui/{plain}", err=True)


def _log_ready(started: Started, options: NodeOptions) -> None:
    """A log is kept, and read by others: it has the place of the password, not the password."""
    dashboard = f"{started.http_url}/ui/"
    about = fields(event=LogEvent.NODE_READY, address=started.url, dashboard=dashboard, path=str(options.data))
    logger.info("ready at %s, dashboard at %s, data in %s", started.url, dashboard, options.data, extra=about)
    if started.plain_url is not None:
        about = fields(event=LogEvent.NODE_READY, address=started.plain_url)
        logger.info("without TLS at %s", started.plain_url, extra=about)
    if started.generated_password is not None:
        path = str(options.data / "password")
        about = fields(event=LogEvent.NODE_READY, user=started.user, path=path)
        logger.info("the password of user %s is in %s", started.user, path, extra=about)
    if started.upr_address is not None:
        about = fields(event=LogEvent.NODE_READY, address=started.upr_address)
        logger.info("UPR draft on %s, with no log-in", started.upr_address, extra=about)
