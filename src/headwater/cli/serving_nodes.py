"""`headwater serve --nodes N`: a whole cluster on this machine, a process for each node.

`serve` hands over to `run_nodes`, which starts the processes, makes them a cluster and watches them. The nodes keep
their ports in the data folder: a node is known by its address, so it must be the same one next time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import rich_click as click
from click.core import ParameterSource

from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.durable_files import replace_file
from headwater.errors import HeadwaterError, InvalidInput
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.accounts import ADMIN
from headwater.node.auth.user_file import PASSWORD_RANDOM_BYTES, readable_password
from headwater.node.bucket_lifecycle import KERNEL_PACKAGES
from headwater.node.membership import PEER_FEATURES
from headwater.node.options import NodeOptions, peer_context
from headwater.phrases import counted, is_compiling
from headwater.protocol.cluster_config import join_host_port
from headwater.protocol.kernels.machine_code import are_compiled
from headwater.protocol.sasl import Credentials

logger = logging.getLogger(__name__)

NODES_MAX = 16
READY_S_MAX = 120.0
STOP_S_MAX = 30.0
SUPERVISED_VARIABLE = "HEADWATER_SUPERVISED"
"""Set in the environment of the nodes."""
_PORTS = ("port", "http_port", "tls_port", "http_tls_port")
_OURS = frozenset({"nodes", "replicas", "data", "user", "password", "as_json", *_PORTS})
_ONE_NODE_ONLY = ("upr_port", "upr_bucket", *(f"advertise_{port}" for port in _PORTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """The ports of one node, which it keeps."""

    port: int
    http_port: int
    tls_port: int | None = None
    """Of nodes that have ports without TLS and with it. Those of nodes that have one kind only are the ones above."""
    http_tls_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `headwater serve --nodes` was given."""

    data: Path
    host: str
    ports: Mapping[str, int | None]
    """The first port of each kind that was asked for: the nodes take that and those that follow."""
    tls: NodeOptions
    """What the nodes have in common of TLS, and nothing else."""
    nodes: int
    replicas: int
    buckets: tuple[str, ...]
    user: str | None
    password: str | None
    first_user_only: bool
    as_json: bool
    logs_json: bool
    arguments: tuple[str, ...]
    """What was given on the command line and is the same for every node."""

    @classmethod
    def of(cls, context: click.Context, data: Path) -> ClusterOptions:
        """What `headwater serve` was given, which is for one node but for some of it."""
        _check_options(context)
        given = context.params
        return cls(
            data=data,
            host=given["host"],
            ports={name: given[name] for name in _PORTS},
            tls=NodeOptions(
                data=data,
                **{name: given[name] for name in ("host", "advertise_host", *_PORTS, "insecure")},
                **{name: given[name] for name in ("tls_cert", "tls_key", "tls_only")},
            ),
            nodes=given["nodes"],
            replicas=given["replicas"],
            buckets=given["buckets"] or ("default",),
            user=given["user"],
            password=given["password"],
            first_user_only=names_first_user_only(context),
            as_json=given["as_json"],
            logs_json=given["log_format"] == "json",
            arguments=tuple(_arguments_for_nodes(context)),
        )


def names_first_user_only(context: click.Context) -> bool:
    """Whether the user is from the environment alone. Clients read the same variables, so they may not be meant for a
    node that has users."""
    sources = [context.get_parameter_source(name) for name in ("user", "password")]
    return all(source is ParameterSource.ENVIRONMENT for source in sources)


def _check_options(context: click.Context) -> None:
    for name in _ONE_NODE_ONLY:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise InvalidInput(f"--{name.replace('_', '-')} is for one node", hint="Leave it out, or leave --nodes out")


def _arguments_for_nodes(context: click.Context) -> list[str]:
    arguments: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _OURS or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        given = context.params[name]
        option = parameter.opts[0]
        if given is True:
            arguments.append(option)
            continue
        for value in given if isinstance(given, tuple) else (given,):
            arguments += [option, str(value)]
    # A person looks for the line with the address, which the nodes' connections to each other would bury.
    is_for_people = context.params["log_format"] == "text"
    if is_for_people and context.get_parameter_source("log_level") is not ParameterSource.COMMANDLINE:
        arguments += ["--log-level", "warning"]
    return arguments


async def run_nodes(options: ClusterOptions) -> None:
    """Start the nodes, make them a cluster, and wait for the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    options.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    credentials, generated = _credentials(options)
    ports = _ports(options)
    processes: list[asyncio.subprocess.Process] = []
    try:
        if not are_compiled(*KERNEL_PACKAGES) and not await _unless(stop, _compile(processes)):
            return
        for at, one in enumerate(ports, start=1):
            processes.append(await _start(options, at, one, credentials))
        addresses = [Address(options.host, one.port) for one in ports]
        if not await _unless(stop, _get_ready(options, processes, addresses, credentials)):
            return
        _announce(options, ports, credentials, generated)
        await _watch(dict(zip(addresses, processes, strict=True)), stop)
    finally:
        await _stop(processes)


async def _compile(processes: list[asyncio.subprocess.Process]) -> None:
    """Here, and reported once: each of the nodes would else compile the same, at the same time."""
    is_compiling()
    # In a process, which can be ended. Ctrl-C is for us.
    command = (sys.executable, "-m", "headwater", "kernels")
    compiling = asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, start_new_session=True)
    processes.append(await compiling)
    if await processes[0].wait():
        raise HeadwaterError("the kernels could not be compiled", hint="Look at what was said above")
    processes.clear()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work; False where it was given up because of a signal."""
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
    tls = None if options.tls.serves_plain else peer_context(options.tls)
    for bucket in options.buckets:
        # One that was dropped is not made again.
        if any(bucket in buckets for buckets in served):
            login = Login(
                credentials=credentials, bucket=bucket, tls=tls, features=PEER_FEATURES, agent="headwater serve"
            )
            await _form_bucket(options, addresses, login)


def _credentials(options: ClusterOptions) -> tuple[Credentials, str | None]:
    """Who logs in, and the password where it had to be made."""
    path = options.data / "password"
    has_own = options.first_user_only and path.exists()
    if options.user is not None and options.password is not None and not has_own:
        return Credentials(options.user, options.password), None
    if path.exists():
        return Credentials(ADMIN, path.read_text().strip()), None
    generated = readable_password(secrets.token_bytes(PASSWORD_RANDOM_BYTES))
    _keep(path, generated + "\n")
    return Credentials(ADMIN, generated), generated


def _ports(options: ClusterOptions) -> list[NodePorts]:
    """Those of the last time, and of nodes that are new the ones from --port on, or free ones."""
    path = options.data / "nodes.json"
    known = [NodePorts(**one) for one in json.loads(path.read_text())] if path.exists() else []
    if len(known) > options.nodes:
        raise InvalidInput(
            f"{options.data} has the data of {counted(len(known), 'node')}",
            hint=f"Give --nodes {len(known)}, or another --data",
        )
    known += [NodePorts(port=0, http_port=0)] * (options.nodes - len(known))
    wanted = _PORTS if options.tls.tls_cert is not None and options.tls.serves_plain else _PORTS[:2]
    for at, one in enumerate(known):
        missing = [name for name in wanted if not getattr(one, name)]
        free = dict(zip(missing, _free_ports(options.host, len(missing)), strict=True))
        asked = {name: first + at for name, first in options.ports.items() if first and name in missing}
        known[at] = replace(one, **(free | asked))
    _keep(path, json.dumps([asdict(one) for one in known]))
    return known


def _keep(path: Path, text: str) -> None:
    """Write a small file as a whole: after a crash with half of it, the nodes could not be started again."""
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


async def _start(
    options: ClusterOptions, at: int, ports: NodePorts, credentials: Credentials
) -> asyncio.subprocess.Process:
    # The password is in the environment, where others on the machine can't see it. The name is there alone where it was
    # so for us: then the nodes make it the first user, and change none.
    is_from_there = options.first_user_only and credentials.user == options.user
    named = () if is_from_there else ("--user", credentials.user)
    given = ((f"--{name.replace('_', '-')}", str(port)) for name, port in asdict(ports).items() if port is not None)
    environment = {
        **os.environ,
        "HEADWATER_USER": credentials.user,
        "HEADWATER_PASSWORD": credentials.password,
        SUPERVISED_VARIABLE: "1",
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headwater", "serve", "--json", "--data", str(options.data / f"node-{at}")),
        *(*chain.from_iterable(given), *named, *options.arguments),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C is for us, and we stop them.
        start_new_session=True,
    )


def stop_with_supervisor(stop: Callable[[], None]) -> None:
    """In a node that `serve --nodes` has started: stop when that process is gone, however it ended.

    It holds the other end of this node's standard input and never writes to it, so that ends with it, also by kill -9.
    Otherwise the node would go on alone, and keep the data from the next start.
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
    """Returns the buckets of the node."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S_MAX):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise HeadwaterError(f"a node was not ready in {READY_S_MAX:.0f} s", hint="Look at its log above") from error
    if not line:
        raise HeadwaterError("a node could not be started", hint="Look at what it has said above")
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


def _announce(options: ClusterOptions, ports: list[NodePorts], credentials: Credentials, generated: str | None) -> None:
    urls, dashboards = _urls(options, ports)
    if options.as_json:
        line: dict[str, object] = {"ready": urls[0], **({"plain": urls[1]} if len(urls) > 1 else {})}
        line |= {"nodes": len(ports), "user": credentials.user, "data": str(options.data)}
        if generated is not None:
            line["password"] = generated
        click.echo(json.dumps(line))
        return
    _print_more(options, ", without TLS ".join(dashboards), " ".join(urls), credentials.user, generated)
    click.echo(f"ready {' '.join(urls)}")


def _urls(options: ClusterOptions, ports: list[NodePorts]) -> tuple[list[str], list[str]]:
    """The connection strings and the dashboards, those with TLS first, as one node has them."""
    host = options.host
    kinds = [("s" if options.tls.tls_cert is not None else "", "port", "http_port")]
    if ports[0].tls_port is not None:
        kinds = [("s", "tls_port", "http_tls_port"), ("", "port", "http_port")]
    urls = [f"couchbase{s}://{','.join(join_host_port(host, getattr(one, kv)) for one in ports)}" for s, kv, _ in kinds]
    dashboards = [f"http{s}://{join_host_port(host, getattr(ports[0], http))}/ui/" for s, _, http in kinds]
    return urls, dashboards


def _print_more(options: ClusterOptions, dashboard: str, url: str, user: str, generated: str | None) -> None:
    """As one node does: in the log for programs, which does not get the password, or for a user at a terminal."""
    path = str(options.data / "password")
    if options.logs_json:
        about = fields(event=LogEvent.NODE_READY, address=url, dashboard=dashboard, user=user, path=path)
        logger.info("ready at %s, dashboard at %s", url, dashboard, extra=about)
        return
    if generated is not None:
        click.echo(f"user {user}, password {generated} (kept in {path})", err=True)
    click.echo(f"data {options.data}", err=True)
    click.echo(f"dashboard {dashboard}", err=True)


async def _watch(nodes: dict[Address, asyncio.subprocess.Process], stop: asyncio.Event) -> None:
    """Until a signal comes. A node that ends is logged, and the others go on: to lose one is what a cluster is for."""
    stopping = asyncio.create_task(stop.wait())
    running = {asyncio.create_task(process.wait()): address for address, process in nodes.items()}
    while running and not stop.is_set():
        done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
        for ended in [task for task in running if task in done]:
            address = running.pop(ended)
            if not stop.is_set():
                hint = f"go on without it with `headwater cluster failover URL {address}`, or start all nodes again"
                about = fields(event=LogEvent.NODE_ENDED, address=str(address), reason=f"exit code {ended.result()}")
                logger.warning("node %s has ended with %s: %s", address, ended.result(), hint, extra=about)
    if not stop.is_set():
        stopping.cancel()
        raise HeadwaterError("all nodes have ended", hint="Look at what they have logged above")


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
