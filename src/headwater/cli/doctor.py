"""`headwater doctor`: can this machine run a node, read that bucket and write that lake?

A check is one function that returns what it has found and what to do about it. It leaves nothing behind: a file written
to test a folder is removed immediately. A result that can't be determined from here is unknown; a check that was not
requested, or whose subject is not installed, is skipped. The table has the order in which a user meets the subjects.

The libraries of the node and of Spark may be missing, which is one of the findings, so each check imports what it
needs.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from headwater._version import __version__
from headwater.cli.options import EXIT_FAILED, LoginOptions, connection_options, errors_reported, storage_option
from headwater.cli.output import click, output_console
from headwater.cli.pipelines import CommandWithPipelines, config_option
from headwater.client.kv_connection import Timeouts
from headwater.client.settings import ClientSettings
from headwater.errors import AccessDenied, HeadwaterError
from headwater.phrases import PACKAGE, counted, install_command, printable

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
"""The oldest version that Spark 4 runs on."""
PROGRAM_S_MAX = 60.0
"""How long another program may take to report its version."""
PROBE_S_MAX = 2.0
ANSWER_BYTES_MAX = 64 * 1024
"""Limits for identifying the program that listens on a port: how long it may take to answer, and how much is read."""
FREE_BYTES_MIN = 1 << 30
KV_PORT, HTTP_PORT = 11210, 8091
NODE, SPARK = "node", "spark"
"""The extras whose libraries are checked."""
MARKS = {NODE: "lmdb", SPARK: "pyspark"}
"""The library that shows that an extra is installed; its other libraries may be installed for another reason."""


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    FAILED = "failed"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a check, and what to do about it."""

    state: State
    says: str
    do: str = ""

    @classmethod
    def of_error(cls, error: HeadwaterError) -> Found:
        return cls(State.FAILED, error.reason, error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to check besides the machine itself."""

    settings: ClientSettings | None = None
    directory: str | None = None
    storage_options: Mapping[str, str]
    is_about_node: bool = True
    """Whether a node is to be started here. With a URL, the question is about a client unless node options say so."""
    data: Path | None = None
    host: str = "127.0.0.1"
    port: int = KV_PORT
    http_port: int = HTTP_PORT


# --- this installation --------------------------------------------------------------------------------------------


def check_python(asked: Asked) -> Found:
    shown = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_MIN:
        least = ".".join(map(str, PYTHON_MIN))
        return Found(State.FAILED, f"Python {shown}", f"Install Headwater with Python {least} or newer")
    return Found(State.OK, f"Python {shown}, Headwater {__version__}, {sys.executable}")


_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?P<bounds>[^;]*)(?:;\s*extra == ['\"](?P<extra>\w+)['\"])?"
)


def _requirements(extra: str | None) -> Iterator[tuple[str, str]]:
    """Yield the libraries of an extra, or with None the mandatory ones, with their version bounds."""
    for text in distribution(PACKAGE).requires or ():
        match = _REQUIREMENT.fullmatch(text.strip())
        if match is not None and match["extra"] == extra:
            yield match["name"], match["bounds"].strip()


def _release(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, and ignore suffixes such as rc1."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", text.strip())[0]))  # type: ignore[index]


def _is_within(installed: str, bounds: str) -> bool:
    """Return whether a version satisfies bounds of the forms >=1.2 and <3, the only ones in `pyproject.toml`."""
    found = _release(installed)
    for bound in filter(None, bounds.split(",")):
        if bound.startswith(">=") and found < _release(bound[2:]):
            return False
        if bound.startswith("<") and found[: len(_release(bound[1:]))] >= _release(bound[1:]):
            return False
    return True


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_installed(extra: str) -> bool:
    """Return whether the extra's mark is installed: pip does not record which extras were requested."""
    return _version(MARKS[extra]) is not None


def _check_libraries(extra: str | None, purpose: str) -> Found:
    try:
        required = list(_requirements(extra))
    except PackageNotFoundError:
        # Headwater runs from its sources, so no package metadata lists its requirements.
        return Found(State.UNKNOWN, "Headwater is not installed as a package", "Run it where pip has installed it")
    command = f"Run {install_command(extra or '')}".replace("[]", "")
    if extra is not None and not _is_installed(extra):
        return Found(State.SKIPPED, f"not installed; {purpose} need them", command)
    faults = []
    for name, bounds in required:
        installed = _version(name)
        if installed is None:
            faults.append(f"{name} is missing")
        elif not _is_within(installed, bounds):
            faults.append(f"{name} {installed}, and {bounds} is needed")
    if faults:
        return Found(State.FAILED, "; ".join(faults), command)
    return Found(State.OK, counted(len(required), "library", plural="libraries"))


def check_libraries(asked: Asked) -> Found:
    return _check_libraries(None, "all commands")


def check_node_libraries(asked: Asked) -> Found:
    return _check_libraries(NODE, "serve, load from files and the pytest plug-in")


def check_spark_libraries(asked: Asked) -> Found:
    return _check_libraries(SPARK, "land, verify and the dcp source")


def check_kernels(asked: Asked) -> Found:
    """Check whether the kernels are compiled for this processor, in a folder that lasts."""
    from headwater.cli.kernels import PARTS
    from headwater.kernels.machine_code import are_compiled, code_folder, has_machine_code, sources_digest

    if not has_machine_code():
        says = "run by Python, which is enough for a client: numba is not installed"
        return Found(State.SKIPPED, says, f"Run {install_command('fast')} to read with a quarter of the processor time")
    folder = code_folder()
    if folder.name != sources_digest():
        folder.rmdir()
        return Found(
            State.WARNING,
            "no folder for machine code is this user's alone and can be written, so each process compiles for itself",
            "Set NUMBA_CACHE_DIR to a folder that this user can write and no other user can",
        )
    compiled: dict[str, bool] = {}
    for part, packages in PARTS.items():
        # A part whose libraries are not installed is skipped: it needs no kernels.
        with suppress(ModuleNotFoundError):
            compiled[part] = are_compiled(*packages)
    missing = [part for part, is_there in compiled.items() if not is_there]
    if missing:
        return Found(
            State.WARNING,
            f"not compiled for this processor in {folder}: those of {', '.join(missing)}",
            "Run headwater kernels; otherwise the first command that uses them takes up to a minute longer",
        )
    return Found(State.OK, f"compiled for {', '.join(compiled)} in {folder}")


# --- Spark's other programs ---------------------------------------------------------------------------------------


def _output_of(*command: str) -> str | None:
    """Return a program's output, or None if it can't be run. (Java prints its version to standard error.)"""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def check_java(asked: Asked) -> Found:
    install = f"Install Java {JAVA_MIN} or newer, such as openjdk-{JAVA_MIN}-jre-headless, or set JAVA_HOME to one"
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java") if home is None else shutil.which(str(Path(home, "bin", "java")))
    if java is None:
        where = "on the path" if home is None else f"in JAVA_HOME, which is {home}"
        return Found(State.FAILED, f"no java {where}", install)
    said = _output_of(java, "-version")
    match = re.search(r'version "(?:1\.)?(\d+)', said or "")
    if match is None:
        return Found(State.UNKNOWN, f"{java} does not report its version", install)
    if int(match[1]) < JAVA_MIN:
        return Found(State.FAILED, f"Java {match[1]} at {java}", install)
    return Found(State.OK, f"Java {match[1]} at {java}")


_VERSIONS = "import sys, headwater; print(sys.version_info[0], sys.version_info[1], headwater.__version__)"


def check_workers(asked: Asked) -> Found:
    """Check the Python that PYSPARK_PYTHON names, in which Spark runs its workers."""
    named = os.environ.get("PYSPARK_PYTHON")
    if named is None:
        return Found(State.OK, "PYSPARK_PYTHON is not set: headwater land sets it to this Python")
    said = _output_of(named, "-c", _VERSIONS)
    advice = f"Set PYSPARK_PYTHON to {sys.executable}, or unset it"
    if said is None:
        return Found(State.FAILED, f"PYSPARK_PYTHON is {named}, which can't import headwater", advice)
    # Warnings may precede the line with the versions.
    versions = re.search(r"^(\d+) (\d+) (\S+)$", said, re.MULTILINE)
    if versions is None:
        return Found(State.UNKNOWN, f"PYSPARK_PYTHON is {named}, which does not report its versions", advice)
    major, minor, installed = versions.groups()
    if (int(major), int(minor)) != sys.version_info[:2] or installed != __version__:
        found = f"PYSPARK_PYTHON is {named}, with Python {major}.{minor} and Headwater {installed}"
        return Found(State.FAILED, f"{found}: not the versions that run here", advice)
    return Found(State.OK, f"PYSPARK_PYTHON is {named}, with the versions that run here")


def check_host_name(asked: Asked) -> Found:
    """Check that this machine's name has an address: Java looks it up, and Spark does not start without one."""
    if local := os.environ.get("SPARK_LOCAL_IP"):
        return Found(State.OK, f"SPARK_LOCAL_IP is {local}")
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        hint = f"Add the line 127.0.0.1 {name} to /etc/hosts, or set SPARK_LOCAL_IP=127.0.0.1"
        return Found(State.FAILED, f"this machine is called {name}, and no address is known for it", hint)
    return Found(State.OK, f"{name} is {address}")


# --- a node on this machine ---------------------------------------------------------------------------------------


_PORT_HINTS = {
    errno.EADDRINUSE: "Stop what has it, or give headwater serve another one as",
    errno.EACCES: "Only root may use ports below 1024: give headwater serve another one as",
}
_OTHER_ADDRESS = "Give headwater serve an address of this machine as --host, or another port as"


def check_ports(asked: Asked) -> Found:
    used: list[str] = []
    for option, port, is_node in (
        ("--port", asked.port, _answers_key_value),
        ("--http-port", asked.http_port, _answers_http),
    ):
        try:
            _bind(asked.host, port)
        except OSError as error:
            if is_node(asked.host, port):
                used.append(f"a node answers on port {port}")
                continue
            hint = f"{_PORT_HINTS.get(error.errno or 0, _OTHER_ADDRESS)} {option}"
            reason = (error.strerror or str(error)).lower()
            return Found(State.FAILED, f"port {port} of {asked.host} can't be used: {reason}", hint)
    if used:
        return Found(
            State.WARNING, "; ".join(used), "Use that node, or give headwater serve other ports for a second one"
        )
    return Found(State.OK, f"ports {asked.port} and {asked.http_port} of {asked.host} are free")


def _bind(host: str, port: int) -> None:
    """Bind a port as a node would. Raises `OSError` if a node could not listen on it."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _answers_key_value(host: str, port: int) -> bool:
    """Return whether a server of the protocol listens on the port: any answers HELLO before a login."""
    from headwater.protocol.features import Magic
    from headwater.protocol.messages.session import Hello

    try:
        with socket.create_connection((host, port), timeout=PROBE_S_MAX) as connection:
            connection.sendall(Hello(key=b"headwater-doctor").encode())
            return connection.recv(1) == bytes([Magic.RESPONSE])
    except OSError:
        return False


def _answers_http(host: str, port: int) -> bool:
    """Return whether a node's HTTP server listens here: Couchbase and Headwater report their version at /pools."""
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=PROBE_S_MAX)) as connection:
            connection.request("GET", "/pools")
            answer = connection.getresponse()
            if answer.status == HTTPStatus.UNAUTHORIZED:
                return answer.getheader("WWW-Authenticate") is not None
            return answer.status == HTTPStatus.OK and "implementationVersion" in json.loads(
                answer.read(ANSWER_BYTES_MAX)
            )
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return False


def check_data_folder(asked: Asked) -> Found:
    from headwater.cli.serve import default_data_folder

    return _check_folder(asked.data or default_data_folder(), "Give headwater serve another folder as --data")


def _check_folder(folder: Path, elsewhere: str) -> Found:
    """Check whether a folder can be written to or created. The file written as a test is removed immediately."""
    there = folder
    try:
        while not there.exists():
            there = there.parent
        with tempfile.NamedTemporaryFile(dir=there, prefix=".headwater-doctor-") as probe:
            probe.write(b"\0")
            probe.flush()
        free_bytes = shutil.disk_usage(there).free
    except OSError as error:
        return Found(State.FAILED, f"{there} can't be written: {(error.strerror or str(error)).lower()}", elsewhere)
    found = f"{folder} {'can be written' if there == folder else 'can be made'}, {free_bytes / 2**30:,.1f} GiB free"
    if free_bytes < FREE_BYTES_MIN:
        return Found(State.WARNING, found, f"Make room. {elsewhere}")
    return Found(State.OK, found)


# --- the bucket, and the right to stream it -----------------------------------------------------------------------


_NO_URL = Found(State.SKIPPED, "no URL was given", "Run headwater doctor couchbase://host/bucket")


def check_bucket(asked: Asked) -> Found:
    """Check host names, ports, TLS, the login and the bucket, as any client would use them."""
    from headwater.client.blocking_bucket import bootstrap

    if asked.settings is None:
        return _NO_URL
    try:
        found = bootstrap(asked.settings)
    except HeadwaterError as error:
        return Found.of_error(error)
    nodes, vbuckets = counted(len(found.cluster_map.nodes), "node"), counted(found.cluster_map.vbuckets, "vbucket")
    return Found(State.OK, f"{asked.settings.bucket} with {vbuckets} on {nodes}, asked at {found.asked}")


def check_rights(asked: Asked) -> Found:
    """Open a DCP connection to every node and request the failover log of every vbucket. No stream is opened."""
    from headwater.client.survey import AsyncSurveyor
    from headwater.client.threads import run_blocking
    from headwater.protocol.numbers import VBucketId

    if asked.settings is None:
        return _NO_URL

    async def ask(settings: ClientSettings) -> tuple[int, int]:
        surveyor = await AsyncSurveyor.open(settings)
        try:
            vbuckets = surveyor.cluster_map.vbuckets
            return vbuckets, len(await surveyor.ask_once(map(VBucketId, range(vbuckets))))
        finally:
            surveyor.close()

    try:
        vbuckets, seen = run_blocking(partial(ask, asked.settings))
    except AccessDenied as error:
        return Found(State.FAILED, error.reason, "Give the user the role data_dcp_reader on this bucket")
    except HeadwaterError as error:
        return Found.of_error(error)
    if seen < vbuckets:
        gone = vbuckets - seen
        says = f"{counted(gone, 'vbucket')} of {vbuckets:,} {'has' if gone == 1 else 'have'} no active node"
        return Found(State.FAILED, says, "Wait for a rebalance or a failover to end, and look whether all nodes are up")
    return Found(State.OK, f"may stream all {counted(vbuckets, 'vbucket')}; the right to write was not tried")


# --- the lake -----------------------------------------------------------------------------------------------------


def check_lake(asked: Asked) -> Found:
    """Check whether the location can be written, and whether its tables are sound and belong to this bucket."""
    if asked.directory is None:
        return Found(State.SKIPPED, "no directory was given", "Run headwater doctor URL DIRECTORY")
    try:
        from headwater.lake.lake import Lake
        from headwater.lake.location import Location
    except ModuleNotFoundError as error:
        return Found(State.UNKNOWN, f"{error.name} is not installed", f"Run {install_command(SPARK)}")
    try:
        location = Location.of(asked.directory, asked.storage_options)
        if location.is_local:
            place = _check_folder(Path(location.uri), "Give another directory, or one that this user can write")
        else:
            location.check()
            place = Found(State.OK, f"{location.uri} can be read and written")
        if place.state is State.FAILED:
            return place
        bucket_uuid = _bucket_uuid(asked)
        lake = Lake.open(location, bucket_uuid=bucket_uuid)
    except HeadwaterError as error:
        return Found.of_error(error)
    if lake is None:
        return replace(place, says=f"{place.says}; no tables are there yet")
    tables = f"{place.says}; {counted(len(lake.tables), 'table')} with {counted(lake.documents, 'document')}"
    if bucket_uuid is None:
        return Found(State.UNKNOWN, f"{tables}; whether they are this bucket's can't be seen without the bucket")
    return replace(place, says=f"{tables}, of this bucket")


def _bucket_uuid(asked: Asked) -> str | None:
    from headwater.client.blocking_bucket import bootstrap

    try:
        return None if asked.settings is None else bootstrap(asked.settings).bucket_uuid
    except HeadwaterError:
        return None


# --- all checks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    look: Callable[[Asked], Found]
    after: str | None = None
    """This check is impossible if the one named here has failed."""
    extra: str | None = None
    """This check matters only if this extra is installed."""


CHECKS = (
    Check("Python", check_python),
    Check("libraries", check_libraries),
    Check("libraries of the node", check_node_libraries),
    Check("libraries of Spark", check_spark_libraries),
    Check("kernels", check_kernels, after="libraries"),
    Check("Java", check_java, extra=SPARK),
    Check("Spark's workers", check_workers, extra=SPARK),
    Check("host name", check_host_name, extra=SPARK),
    Check("ports", check_ports, extra=NODE),
    Check("data folder", check_data_folder, extra=NODE),
    Check("bucket", check_bucket),
    Check("rights", check_rights, after="bucket"),
    Check("lake", check_lake),
)


# --- the command ---------------------------------------------------------------------------------------------------


TIMEOUTS = Timeouts(connect_s=5.0, answer_s=10.0)
STYLES = {State.WARNING: "yellow", State.FAILED: "bold red", State.UNKNOWN: "yellow", State.SKIPPED: "dim"}


def examine(asked: Asked, checks: tuple[Check, ...] = CHECKS) -> dict[str, Found]:
    """Run the checks, and return the results by name."""
    found: dict[str, Found] = {}
    for check in checks:
        if check.after is not None and found[check.after].state is State.FAILED:
            found[check.name] = Found(State.UNKNOWN, f"the check of {check.after} failed, and comes first")
        elif check.extra == NODE and not asked.is_about_node:
            found[check.name] = Found(
                State.SKIPPED, "only a node needs it", "Give --data or --port to have it looked at with a URL"
            )
        elif check.extra is not None and not _is_installed(check.extra):
            found[check.name] = Found(State.SKIPPED, f"only {_NEEDED_BY[check.extra]} not installed")
        else:
            found[check.name] = check.look(asked)
    return found


_NEEDED_BY = {NODE: "a node needs it, whose libraries are", SPARK: "Spark needs it, which is"}


@click.command(cls=CommandWithPipelines)
@click.argument("url", metavar="[URL|NAME]", required=False)
@click.argument("directory", required=False)
@config_option
@storage_option
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="The data folder of the node to start.")
@click.option("--host", help="The address that the node will listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, 65535), help=f"Its key-value port. [default: {KV_PORT}]")
@click.option("--http-port", type=click.IntRange(1, 65535), help=f"Its HTTP port. [default: {HTTP_PORT}]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
@errors_reported
def doctor(
    url: str | None,
    directory: str | None,
    storage_options: dict[str, str],
    data: Path | None,
    host: str | None,
    port: int | None,
    http_port: int | None,
    as_json: bool,
    login: LoginOptions,
) -> None:
    """Check whether this machine has what Headwater needs, and how to fix what is missing.

    Checks Python and its libraries, the kernels and Java. Without URL, or with options of a node, it checks the ports
    and the data folder. With URL, it connects to the bucket, logs in, and checks that the user may stream it. With
    DIRECTORY, the location of a landing's tables, it checks that they can be written and belong to this bucket. It
    changes nothing.

    Each check is ok, warning, failed, unknown (it can't be determined from here) or skipped (not requested, or not
    installed). The exit code is 1 if any check failed, and 0 otherwise.

    With NAME, the bucket and the tables come from a pipeline in headwater.toml.

    \b
    Examples:
      headwater doctor
      headwater doctor couchbase://localhost/default /data/lake
      headwater doctor shop --json
    """
    asked = Asked(
        settings=None if url is None else login.settings(url, timeouts=TIMEOUTS),
        directory=directory,
        storage_options=storage_options,
        is_about_node=url is None or any(one is not None for one in (data, host, port, http_port)),
        data=data,
        host=host or "127.0.0.1",
        port=port or KV_PORT,
        http_port=http_port or HTTP_PORT,
    )
    found = examine(asked)
    failed = [name for name, one in found.items() if one.state is State.FAILED]
    if as_json:
        rows = [{"check": name, "state": one.state, "found": one.says, "do": one.do} for name, one in found.items()]
        click.echo(json.dumps({"ok": not failed, "checks": rows}))
    else:
        _print(found, failed)
    sys.exit(EXIT_FAILED if failed else 0)


def _print(found: Mapping[str, Found], failed: list[str]) -> None:
    table = Table("check", "state", Column("found", overflow="fold"))
    advice: dict[str, list[str]] = {}
    for name, one in found.items():
        # Text from servers and file names may hold control characters, which must not reach the terminal.
        table.add_row(name, one.state, Text(printable(one.says)), style=STYLES.get(one.state))
        if one.do:
            advice.setdefault(printable(one.do), []).append(name)
    console = output_console()
    console.print(table)
    # Not in the table: a command that is wrapped over several lines can't be copied.
    for do, names in advice.items():
        console.print(f"{', '.join(names)}: {do}", soft_wrap=True, markup=False)
    verdict = f"{counted(len(failed), 'check')} failed: {', '.join(failed)}." if failed else "No check failed."
    console.print(verdict, style="bold red" if failed else "green", soft_wrap=True)
