"""`headwater health`: report whether a node, a cluster or a landing is healthy, for people and for monitoring.

The command detects the kind of TARGET, and prints the verdict that the dashboard or the landing's page shows. It asks
every node of a cluster, because each node knows only its own disk and connections, and which nodes it can't reach.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Any

from headwater.cli import management, options
from headwater.cli.output import click
from headwater.errors import HeadwaterError, InvalidInput
from headwater.findings import Finding, Level, Verdict, worst_first
from headwater.http import TOKEN_VARIABLE
from headwater.phrases import install_command, missing_library, printable

ANSWER_S = 10.0
"""How long a node or a page may take to answer. For monitoring, one that hangs is down."""
ASKED_AT_ONCE_MAX = 16
EXITS = {Level.OK: 0, Level.WARN: options.EXIT_WARNING, Level.BAD: options.EXIT_CRITICAL}
_WORDS = {Level.BAD: "critical", Level.WARN: "warning", Level.OK: "ok"}
_COUCHBASE, _HTTP = ("couchbase", "couchbases"), ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result that the command prints."""

    verdict: Verdict
    where: Mapping[Finding, tuple[str, ...]]
    """The nodes, buckets or pipelines that a finding is about; empty if it is about the whole target."""
    parts: Mapping[str, Any]
    """The verdicts as they were received, by node or by pipeline."""

    def members(self) -> dict[str, Any]:
        findings = [{**asdict(one), "where": list(self.where.get(one, ()))} for one in self.verdict.findings]
        return {**self.verdict.show(), "findings": findings, "parts": self.parts}

    def lines(self) -> Iterator[str]:
        if not self.verdict.findings:
            yield f"{_WORDS[self.verdict.level]}: {self.verdict.text}"
        said = ""
        for one in self.verdict.findings:
            where = ", ".join(self.where.get(one, ()))
            yield f"{_WORDS[one.level]}: {one.text}{f' ({where})' if where else ''}"
            if one.do != said:
                yield f"  {one.do}"
            said = one.do


@click.command()
@click.argument("target", metavar="TARGET")
@options.connection_options
@management.http_port_option
@options.storage_option
@options.json_option
@options.errors_reported
def health(
    target: str, login: options.LoginOptions, http_port: int | None, storage_options: dict[str, str], as_json: bool
) -> None:
    """Report whether a node, a cluster or a landing is healthy, and what to do if not.

    TARGET is the URL of a node (couchbase://host[:port][/bucket] or http://host:port), the address of a landing's page,
    or the directory or object store of a landing. The command asks all nodes of the node's cluster, about the bucket or
    about all buckets that the user may use. The role ro_admin is enough. HEADWATER_UI_TOKEN has the token for a page
    that needs one.

    The exit code is 0 if all is well, 3 for warnings, 4 if something does not work or data may be lost, and 1 if the
    health can't be determined: nothing answers, or the user may not ask. 2 is for an invalid command line.

    \b
    Examples:
      headwater health couchbase://127.0.0.1/default
      headwater health --json http://127.0.0.1:8091
      headwater health http://127.0.0.1:8080
      headwater health /data/lake
    """
    scheme = target.partition("://")[0].lower() if "://" in target else ""
    if scheme in _COUCHBASE:
        report = _of_nodes(management.ManagementUrl.parse(target, needs_bucket=False), login, http_port)
    elif scheme in _HTTP:
        where = management.ManagementUrl.parse(target.rstrip("/").removesuffix("/ui"), needs_bucket=False)
        root = management.Management(
            address=where.addresses[0], credentials=None, tls=login.tls_context(where), answer_s=ANSWER_S
        )
        content = root.ask("GET").content
        is_node = isinstance(content, dict) and content.get("name") == "headwater"
        report = _of_nodes(where, login, http_port) if is_node else _of_page(root)
    else:
        report = _of_lake(target, storage_options)
    for line in [json.dumps(report.members())] if as_json else map(printable, report.lines()):
        click.echo(line)
    sys.exit(EXITS[report.verdict.level])


# --- nodes --------------------------------------------------------------------------------------------------------


def _of_nodes(where: management.ManagementUrl, login: options.LoginOptions, http_port: int | None) -> Report:
    credentials, tls = login.needed_credentials(where), login.tls_context(where)
    address = management.find_management(where, credentials=credentials, tls=tls, http_port=http_port)
    first = management.Management(address=address, credentials=credentials, tls=tls, answer_s=ANSWER_S)
    nodes = management.nodes_of_cluster(first, bucket=where.bucket)
    with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE_MAX) as threads:
        answers = list(threads.map(lambda node: _ask_node(node, where.bucket), nodes))
    parts: dict[str, Any] = {}
    found: list[tuple[str, str, Finding]] = []
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, HeadwaterError):
            text, do = f"{node.address} does not say how it is: {answer.reason}", answer.hint
            found.append(("", "", Finding(check="unanswered", level=Level.WARN, text=text, do=do)))
            continue
        parts[str(node.address)] = answer
        found += [
            (str(node.address), bucket if len(answer) > 1 else "", one)
            for bucket, verdict in answer.items()
            for one in _findings(verdict)
        ]
    if not parts:
        raise next(answer for answer in answers if isinstance(answer, HeadwaterError))
    well = dict.fromkeys(str(verdict["text"]) for answer in parts.values() for verdict in answer.values())
    return _report(found, of=set(parts), well="; ".join(well) or "The user has no bucket", parts=parts)


def _ask_node(node: management.Management, bucket: str) -> dict[str, Any] | HeadwaterError:
    """Return a node's verdicts by bucket, or the error if it gives none."""
    try:
        answer = (
            node.ask("GET", "headwater", "buckets", bucket, "health")
            if bucket
            else node.ask("GET", "headwater", "health")
        )
        if answer.status == HTTPStatus.NOT_FOUND and not bucket:
            raise HeadwaterError("it is not a Headwater node", hint="Only Headwater nodes report their health")
        content = answer.accepted()
        verdicts: dict[str, Any] = {bucket: content} if bucket else content["buckets"]
        for verdict in verdicts.values():
            _findings(verdict)
    except HeadwaterError as error:
        return error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return HeadwaterError(f"its answer can't be read: {error!r}", hint="Check that it is a node of Headwater")
    return verdicts


def _findings(verdict: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a verdict that was received as JSON."""
    names = ("check", "text", "do", "page")
    return [
        Finding(level=Level(one["level"]), **{name: str(one.get(name, "")) for name in names})
        for one in verdict["findings"]
    ]


def _report(found: Iterable[tuple[str, str, Finding]], *, of: set[str], well: str, parts: Mapping[str, Any]) -> Report:
    """Merge equal findings, and name the nodes and buckets that report one if not all do."""
    first: dict[tuple[str, Level, str], Finding] = {}
    by: dict[Finding, list[tuple[str, str]]] = {}
    for part, bucket, finding in found:
        # `do` is not compared: it contains the address of the node that reports the finding.
        same = first.setdefault((finding.check, finding.level, finding.text), finding)
        by.setdefault(same, []).append((part, bucket))
    where = {}
    for finding, places in by.items():
        said_by = [part for part in dict.fromkeys(part for part, _ in places) if part]
        buckets = [bucket for bucket in dict.fromkeys(bucket for _, bucket in places) if bucket]
        where[finding] = (*buckets, *(said_by if set(said_by) != of else ()))
    return Report(verdict=Verdict.of(worst_first(by), well=well), where=where, parts=parts)


# --- landings -----------------------------------------------------------------------------------------------------


def _of_page(page: management.Management) -> Report:
    token = os.environ.get(TOKEN_VARIABLE)
    answer = replace(page, token=token).ask("GET", "ui", "api", "health")
    if answer.status == HTTPStatus.UNAUTHORIZED:
        raise HeadwaterError("the page needs a token, or another one", hint=f"Set {TOKEN_VARIABLE}")
    try:
        parts: dict[str, Any] = answer.accepted()["pipelines"]
        found = [(name, "", one) for name, verdict in parts.items() for one in _findings(verdict)]
        well = "; ".join(f"{name}: {one['text']}" if name else str(one["text"]) for name, one in parts.items())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise HeadwaterError(
            f"{page.address} is neither a node nor the page of a landing",
            hint="Give the address that `headwater land --ui` prints, or the directory of the landing",
        ) from error
    return _report(found, of=set(parts), well=well, parts=parts)


def _of_lake(target: str, storage_options: dict[str, str]) -> Report:
    try:
        from headwater.lake.lake_look import LakeWatch
        from headwater.lake.location import Location
        from headwater.lake_page.app import LakeState
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"the tables of a landing need {missing_library(error)}, which is not installed",
            hint=f"Run {install_command('lake')}",
        ) from error
    state = LakeState(LakeWatch(Location.of(target, storage_options)))
    verdict = state.show()["health"]
    return _report([("", "", one) for one in _findings(verdict)], of=set(), well=verdict["text"], parts={"": verdict})
