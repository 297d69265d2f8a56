"""`headwater serve`: run a node."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import uvloop
from click.core import ParameterSource

from headwater.cli.options import EXIT_FAILED, GivenOptions, options_from, repeated_words
from headwater.cli.output import FORMATS, LEVELS, click, set_up_logging
from headwater.cli.supervising import PORTS_FILE, StartRequests, supervising
from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.durable_files import replace_file
from headwater.errors import HeadwaterError, InvalidInput
from headwater.kernels.machine_code import are_compiled
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.accounts import ADMIN, PASSWORD_RANDOM_BYTES, readable_password
from headwater.node.bucket_lifecycle import KERNEL_PACKAGES
from headwater.node.membership import PEER_FEATURES
from headwater.node.node import Node, Started
from headwater.node.node_folder import keep_freed_memory, raise_open_files_limit
from headwater.node.options import NodeOptions, ServerLimits, peer_context
from headwater.options import option
from headwater.phrases import counted, report_compile
from headwater.protocol.cluster_config import join_host_port
from headwater.protocol.sasl import Credentials
from headwater.store.vbuckets import Retention

logger = logging.getLogger(__name__)

NODES_MAX = 16
GIVE_UP_S = 1.0
"""How long a cancelled start may take to clean up."""


def default_data_folder() -> Path:
    """Return the default folder in the user's data directory, following the XDG base directory specification."""
    if sys.platform == "darwin":
        return Path(click.get_app_dir("headwater")) / "data"
    named = os.environ.get("XDG_DATA_HOME", "")
    # The specification says to ignore relative paths.
    home = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "share"
    return home / "headwater" / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `headwater serve` that are not options of a single node."""

    data: str | None = option(
        "The data directory.",
        metavar="DIRECTORY",
        default_words="headwater/data in your folder for data, ~/.local/share",
    )
    as_json: bool = option("Print the ready line as JSON.", False, cli_name="--json")
    log_format: str = option(
        "The format of the log on standard error: text, or one JSON object per line.",
        "text",
        choices={name: name for name in FORMATS},
    )
    log_level: str = option(
        "The lowest level to log. The opening and closing of DCP connections is info. With --nodes and without "
        "--log-format json, the default is warning.",
        "info",
        choices={name: name for name in LEVELS},
    )
    nodes: int | None = option("Run a cluster of N nodes on this machine.", least=1, most=NODES_MAX)
    replicas: int = option("Replicas of each vbucket, with --nodes.", 1, least=0, most=3)

    @property
    def folder(self) -> Path:
        return default_data_folder() if self.data is None else Path(self.data)


@click.command()
@options_from(ServeOptions, NodeOptions, Retention, ServerLimits)
@click.pass_context
def serve(context: click.Context, given: GivenOptions) -> None:
    """Run a node that Couchbase applications can write to.

    Without options, it listens on loopback, serves one bucket `default`, keeps its data in your data folder, whose
    location it prints, and generates a password, which it shows once. It does not start if another program uses one of
    its ports.

    With --tls-cert and --tls-key, it has both plain ports and ports with TLS, like Couchbase, on loopback or with
    --insecure. Otherwise, and with --tls-only, all its ports use TLS, and --port and --http-port set those.

    SIGTERM and Ctrl-C stop the node cleanly, with exit code 0. The exit code is 1 if the node can't start, and 2 for an
    invalid command line.

    \b
    Examples:
      headwater serve
      headwater serve --data /tmp/demo --bucket travel --user me --password secret
      headwater serve --port 0 --http-port 0 --json
      headwater serve --data /tmp/cluster --nodes 4 --replicas 1
    """
    serving = given.make(ServeOptions)
    set_up_logging(serving.log_format, level=serving.log_level)
    files_max = raise_open_files_limit()
    try:
        if serving.nodes is not None:
            check_cluster_options(context)
        options = given.make(
            NodeOptions,
            data=serving.folder,
            first_user_only=names_first_user_only(context),
            supervised_in=_supervised_in(),
            retention=given.make(Retention),
            limits=given.make(ServerLimits).within_open_files(files_max),
        )
        if serving.nodes is not None:
            cluster = ClusterOptions(
                node=options,
                nodes=serving.nodes,
                replicas=serving.replicas,
                as_json=serving.as_json,
                logs_json=serving.log_format == "json",
                arguments=tuple(arguments_for_nodes(context)),
            )
            uvloop.run(run_nodes(cluster))
            return
        keep_freed_memory()
        uvloop.run(_run(options, as_json=serving.as_json, log_format=serving.log_format))
    except HeadwaterError as error:
        if serving.log_format == "json":
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
    node = Node(options, coordinator=Coordinator)
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
    """Start the node. Returns None if a signal stopped it before it was ready."""
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
    # A thread compiles or loads a large bucket, and can't be cancelled. Nothing is lost: a kernel is kept only when
    # complete, and a bucket that was closed cleanly still counts as such until it is loaded.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _announce(started: Started, options: NodeOptions, *, as_json: bool) -> None:
    """Print the single line on standard output that reports the node as ready."""
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
    """Print, for a user at a terminal, where data and dashboard are, and once the generated password."""
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
    """Log the addresses. Logs are kept and read by others, so they name the password's file, not the password."""
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


# --- a cluster on this machine, a process for each node -----------------------------------------------------------


READY_S_MAX = 120.0
STOP_S_MAX = 30.0
SUPERVISED_VARIABLE = "HEADWATER_SUPERVISED"
"""Set in the environment of the nodes: the data folder of the whole cluster."""
_PORTS = ("port", "http_port", "tls_port", "http_tls_port")
_OURS = frozenset({"nodes", "replicas", "data", "user", "password", "as_json", *_PORTS})
_ONE_NODE_ONLY = ("upr_port", "upr_bucket", *(f"advertise_{port}" for port in _PORTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """The ports of one node, which stay the same across restarts."""

    port: int
    http_port: int
    tls_port: int | None = None
    """Set for nodes with both plain and TLS ports. Nodes with only one kind use the ports above."""
    http_tls_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of `headwater serve --nodes`."""

    node: NodeOptions
    """The options that all nodes share. A port is the first of its kind: the nodes take it and those that follow."""
    nodes: int
    replicas: int
    as_json: bool
    logs_json: bool
    arguments: tuple[str, ...]
    """The options of the command line that are the same for every node."""


def names_first_user_only(context: click.Context) -> bool:
    """Return whether the user comes only from the environment. Clients read the same variables, so they may not be
    meant for a node that already has users."""
    sources = [context.get_parameter_source(name) for name in ("user", "password")]
    return all(source is ParameterSource.ENVIRONMENT for source in sources)


def check_cluster_options(context: click.Context) -> None:
    """Raise for an option that a cluster does not support."""
    for name in _ONE_NODE_ONLY:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise InvalidInput(f"--{name.replace('_', '-')} is for one node", hint="Omit it, or omit --nodes")


def arguments_for_nodes(context: click.Context) -> list[str]:
    arguments = repeated_words(context, _OURS)
    # A user looks for the line with the address, which the log of the nodes' connections would bury.
    is_for_people = context.params["log_format"] == "text"
    if is_for_people and context.get_parameter_source("log_level") is not ParameterSource.COMMANDLINE:
        arguments += ["--log-level", "warning"]
    return arguments


async def run_nodes(options: ClusterOptions) -> None:
    """Start the nodes, form a cluster of them, and wait for the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    options.node.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    credentials, generated = _credentials(options)
    ports = _ports(options)
    addresses = [Address(options.node.host, one.port) for one in ports]
    processes: list[asyncio.subprocess.Process] = []

    async def start_again(number: int) -> None:
        processes[number - 1] = process = await _start_node(options, number, ports[number - 1], credentials)
        await _ready(process)

    with supervising(options.node.data) as requests:
        try:
            if not are_compiled(*KERNEL_PACKAGES) and not await _unless(stop, _compile(processes)):
                return
            for at, one in enumerate(ports, start=1):
                processes.append(await _start_node(options, at, one, credentials))
            if not await _unless(stop, _get_ready(options, processes, addresses, credentials)):
                return
            _announce_cluster(options, ports, credentials, generated)
            await _Watch(options, addresses, processes, stop, requests, start_again).run()
        finally:
            await _stop(processes)


async def _compile(processes: list[asyncio.subprocess.Process]) -> None:
    """Compile the kernels here, and report it once: otherwise all nodes would compile the same concurrently."""
    report_compile()
    # In a separate process, which can be terminated. Only this process handles Ctrl-C.
    command = (sys.executable, "-m", "headwater", "kernels")
    compiling = asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, start_new_session=True)
    processes.append(await compiling)
    if await processes[0].wait():
        raise HeadwaterError("the kernels could not be compiled", hint="See the output above")
    processes.clear()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work. Returns False if a signal interrupted it."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        await working
        return True
    working.cancel()
    await asyncio.wait({working})
    return False


async def _get_ready(
    options: ClusterOptions,
    processes: Sequence[asyncio.subprocess.Process],
    addresses: list[Address],
    credentials: Credentials,
) -> None:
    served = await asyncio.gather(*(_ready(process) for process in processes))
    tls = None if options.node.serves_plain else peer_context(options.node)
    for bucket in options.node.buckets:
        # A bucket that was dropped on all nodes is not created again.
        if any(bucket in buckets for buckets in served):
            login = Login(
                credentials=credentials, bucket=bucket, tls=tls, features=PEER_FEATURES, agent="headwater serve"
            )
            await _form_bucket(options, addresses, login)


def _credentials(options: ClusterOptions) -> tuple[Credentials, str | None]:
    """Return the credentials, and the password if it was generated now."""
    path = options.node.data / "password"
    has_own = options.node.first_user_only and path.exists()
    if options.node.user is not None and options.node.password is not None and not has_own:
        return Credentials(options.node.user, options.node.password), None
    if path.exists():
        return Credentials(ADMIN, path.read_text().strip()), None
    generated = readable_password(secrets.token_bytes(PASSWORD_RANDOM_BYTES))
    _keep(path, generated + "\n")
    return Credentials(ADMIN, generated), generated


def _ports(options: ClusterOptions) -> list[NodePorts]:
    """Return the known ports. New nodes get those from --port on, or free ones."""
    path = options.node.data / PORTS_FILE
    known = [NodePorts(**one) for one in json.loads(path.read_text())] if path.exists() else []
    if len(known) > options.nodes:
        raise InvalidInput(
            f"{options.node.data} has the data of {counted(len(known), 'node')}",
            hint=f"Give --nodes {len(known)}, or another --data",
        )
    known += [NodePorts(port=0, http_port=0)] * (options.nodes - len(known))
    wanted = _PORTS if options.node.tls_cert is not None and options.node.serves_plain else _PORTS[:2]
    for at, one in enumerate(known):
        missing = [name for name in wanted if not getattr(one, name)]
        free = dict(zip(missing, _free_ports(options.node.host, len(missing)), strict=True))
        asked = {name: first + at for name in missing if (first := getattr(options.node, name))}
        known[at] = replace(one, **(free | asked))
    _keep(path, json.dumps([asdict(one) for one in known]))
    return known


def _keep(path: Path, text: str) -> None:
    """Replace a small file atomically: if a crash left half of it, the nodes could not be restarted."""
    try:
        replace_file(path, text.encode(), is_private=True)
    except OSError as error:
        raise HeadwaterError(
            f"{path} can't be written: {error.strerror}", hint="Check the folder's permissions and free space"
        ) from error


def _free_ports(host: str, count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]


async def _start_node(
    options: ClusterOptions, at: int, ports: NodePorts, credentials: Credentials
) -> asyncio.subprocess.Process:
    # The password is in the environment, where other users of the machine can't see it. If this process got the
    # name only from the environment, so do the nodes, and then only create a first user with it.
    is_from_there = options.node.first_user_only and credentials.user == options.node.user
    named = () if is_from_there else ("--user", credentials.user)
    given = ((f"--{name.replace('_', '-')}", str(port)) for name, port in asdict(ports).items() if port is not None)
    environment = {
        **os.environ,
        "HEADWATER_USER": credentials.user,
        "HEADWATER_PASSWORD": credentials.password,
        SUPERVISED_VARIABLE: str(options.node.data.absolute()),
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headwater", "serve", "--json", "--data", str(options.node.data / f"node-{at}")),
        *(*chain.from_iterable(given), *named, *options.arguments),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Only this process handles Ctrl-C, and it stops the nodes.
        start_new_session=True,
    )


def _supervised_in() -> Path | None:
    folder = os.environ.get(SUPERVISED_VARIABLE)
    return None if folder is None else Path(folder)


def stop_with_supervisor(stop: Callable[[], None]) -> None:
    """Stop a node that `serve --nodes` has started when that process is gone, however it ended.

    The supervisor holds the other end of this node's standard input and never writes to it, so the input ends with
    the supervisor, even after kill -9. Otherwise the node would keep running, and block its data from the next start.
    """
    if SUPERVISED_VARIABLE not in os.environ:
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def look() -> None:
        if not os.read(descriptor, 1):
            loop.remove_reader(descriptor)
            about = fields(event=LogEvent.NODE_ENDED, reason="the supervisor is gone")
            logger.warning("the process that supervises this node is gone: the node stops", extra=about)
            stop()

    loop.add_reader(descriptor, look)


async def _ready(process: asyncio.subprocess.Process) -> list[str]:
    """Wait until a node is ready. Returns its buckets."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S_MAX):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise HeadwaterError(f"a node was not ready in {READY_S_MAX:.0f} s", hint="See its log above") from error
    if not line:
        raise HeadwaterError("a node could not be started", hint="See its output above")
    buckets: list[str] = json.loads(line)["buckets"]
    return buckets


async def _form_bucket(options: ClusterOptions, addresses: list[Address], login: Login) -> None:
    known = Coordinator(addresses, login)
    try:
        if not await known.is_formed():
            config = await known.init(replicas=options.replicas)
            if not config.settled:
                await known.rebalance()
            return
        for address in addresses:
            await known.add(address)
        status = await known.status()
        if not status.settled:
            await known.rebalance()
    finally:
        known.close()


def _announce_cluster(
    options: ClusterOptions, ports: list[NodePorts], credentials: Credentials, generated: str | None
) -> None:
    urls, dashboards = _urls(options, ports)
    if options.as_json:
        line: dict[str, object] = {"ready": urls[0], **({"plain": urls[1]} if len(urls) > 1 else {})}
        line |= {"nodes": len(ports), "user": credentials.user, "data": str(options.node.data)}
        if generated is not None:
            line["password"] = generated
        click.echo(json.dumps(line))
        return
    _print_cluster(options, ", without TLS ".join(dashboards), " ".join(urls), credentials.user, generated)
    click.echo(f"ready {' '.join(urls)}")


def _urls(options: ClusterOptions, ports: list[NodePorts]) -> tuple[list[str], list[str]]:
    """Return the connection strings and the dashboards. Those with TLS come first, as for a single node."""
    host = options.node.host
    kinds = [("s" if options.node.tls_cert is not None else "", "port", "http_port")]
    if ports[0].tls_port is not None:
        kinds = [("s", "tls_port", "http_tls_port"), ("", "port", "http_port")]
    urls = [f"couchbase{s}://{','.join(join_host_port(host, getattr(one, kv)) for one in ports)}" for s, kv, _ in kinds]
    dashboards = [f"http{s}://{join_host_port(host, getattr(ports[0], http))}/ui/" for s, _, http in kinds]
    return urls, dashboards


def _print_cluster(options: ClusterOptions, dashboard: str, url: str, user: str, generated: str | None) -> None:
    """Print what a single node prints: to the log for programs, without the password, or for a user at a terminal."""
    path = str(options.node.data / "password")
    if options.logs_json:
        about = fields(event=LogEvent.NODE_READY, address=url, dashboard=dashboard, user=user, path=path)
        logger.info("ready at %s, dashboard at %s", url, dashboard, extra=about)
        return
    if generated is not None:
        click.echo(f"user {user}, password {generated} (kept in {path})", err=True)
    click.echo(f"data {options.node.data}", err=True)
    click.echo(f"dashboard {dashboard}", err=True)


@dataclass(slots=True)
class _Watch:
    """Waits for a signal. A node that ends is logged, and the others continue: a cluster tolerates the loss."""

    options: ClusterOptions
    addresses: list[Address]
    processes: list[asyncio.subprocess.Process]
    stop: asyncio.Event
    requests: StartRequests
    start_again: Callable[[int], Awaitable[None]]
    """Restarts the node with this number, and returns once it is ready."""

    async def run(self) -> None:
        stopping = asyncio.create_task(self.stop.wait())
        running = {asyncio.create_task(one.wait()): number for number, one in enumerate(self.processes, start=1)}
        asking = asyncio.create_task(self.requests.asked.wait())
        while running and not self.stop.is_set():
            done, _ = await asyncio.wait([stopping, asking, *running], return_when=asyncio.FIRST_COMPLETED)
            for ended in [task for task in running if task in done]:
                number = running.pop(ended)
                if not self.stop.is_set():
                    self._log_ended(self.addresses[number - 1], ended.result())
            if asking in done:
                await _unless(self.stop, self._start_asked(running))
                asking = asyncio.create_task(self.requests.asked.wait())
        asking.cancel()
        if not self.stop.is_set():
            stopping.cancel()
            raise HeadwaterError("all nodes have ended", hint="See their logs above")

    def _log_ended(self, address: Address, code: int) -> None:
        data = shlex.quote(str(self.options.node.data))
        hint = (
            f"go on without it with `headwater cluster failover URL {address}`, or start it again with "
            f"`headwater cluster restart-node {data} {address}`"
        )
        about = fields(event=LogEvent.NODE_ENDED, address=str(address), reason=f"exit code {code}")
        logger.warning("node %s has ended with %s: %s", address, code, hint, extra=about)

    async def _start_asked(self, running: dict[asyncio.Task[int], int]) -> None:
        """Restart the nodes that commands have requested."""
        for number in self.requests.take():
            if number in running.values():
                self.requests.answer(number, problem=f"{self.addresses[number - 1]} is running already")
                continue
            try:
                await self.start_again(number)
            except HeadwaterError as error:
                self.requests.answer(number, problem=error.reason)
                continue
            finally:
                # A node that is not ready may still be running, and ends with the others.
                running[asyncio.create_task(self.processes[number - 1].wait())] = number
            about = fields(event=LogEvent.NODE_READY, address=str(self.addresses[number - 1]))
            logger.warning("node %s is running again", self.addresses[number - 1], extra=about)
            self.requests.answer(number)


async def _stop(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
    for process in processes:
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
