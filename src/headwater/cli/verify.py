"""`headwater verify`: is the table the bucket?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import rich_click as click
from rich.table import Table

from headwater.cli.connection_options import EXIT_FAILED, connection_options, credentials, errors_told, tls_settings
from headwater.cli.consoles import output_console
from headwater.client.client_settings import ClientSettings
from headwater.client.connection_string import ConnectionString
from headwater.counted import counted
from headwater.spark.verification import Comparison, VBucketComparison, Verdict, compare

ROWS_SHOWN = 20
_STYLES = {Verdict.EQUAL: "green", Verdict.DIFFERS: "bold red", Verdict.BEHIND: "yellow"}


@click.command()
@click.argument("url")
@click.argument("directory")
@click.option("--collection", "collections", multiple=True, metavar="SCOPE.COLLECTION", help="What was landed only.")
@click.option("--scope", "scopes", multiple=True, metavar="SCOPE", help="What was landed only.")
@click.option("--all", "show_all", is_flag=True, help="Show every vbucket, not just those that are not equal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
@errors_told
def verify(
    url: str,
    directory: str,
    collections: tuple[str, ...],
    scopes: tuple[str, ...],
    show_all: bool,
    as_json: bool,
    user: str | None,
    password: str | None,
    tls_ca: Path | None,
    tls_skip_verify: bool,
) -> None:
    """Compare a bucket with the tables that it was landed in.

    Of every vbucket of URL and of the tables in DIRECTORY a digest is made, at the same place in its history, over
    every document: collection, key, value, flags, expiry, CAS, revision and seqno.

    The exit code is 0 only if all are equal, and 1 otherwise. A vbucket whose tables are behind the bucket can't be
    compared: land what is missing first, with no writes going on.

    \b
    Examples:
      headwater verify couchbase://localhost/default /data/lake
      headwater verify couchbase://localhost/default /data/lake --all
    """
    where = ConnectionString.parse(url)
    settings = ClientSettings.of(
        where, credentials(where, user, password), tls=tls_settings(tls_ca, tls_skip_verify), agent="headwater-verify"
    )
    comparison = compare(settings, directory, scopes=scopes, collections=collections)
    if as_json:
        click.echo(json.dumps(_as_object(comparison, show_all)))
    else:
        _print(comparison, show_all)
    sys.exit(0 if comparison.is_equal else EXIT_FAILED)


def _shown(comparison: Comparison, show_all: bool) -> list[VBucketComparison]:
    return [one for one in comparison.vbuckets if show_all or one.verdict is not Verdict.EQUAL]


def _as_object(comparison: Comparison, show_all: bool) -> dict[str, object]:
    return {
        "equal": comparison.is_equal,
        "documents": comparison.documents,
        "collections": comparison.collections,
        "vbuckets": {str(verdict): comparison.count(verdict) for verdict in Verdict},
        "shown": [asdict(one) for one in _shown(comparison, show_all)],
    }


def _print(comparison: Comparison, show_all: bool) -> None:
    console = output_console()
    rows = _shown(comparison, show_all)
    if rows:
        console.print(_table(rows if show_all else rows[:ROWS_SHOWN]))
    if len(rows) > ROWS_SHOWN and not show_all:
        console.print(f"and {len(rows) - ROWS_SHOWN:,} more; --all shows them")
    counts = ", ".join(
        f"[{_STYLES[verdict]}]{count:,} {verdict}[/]" for verdict in Verdict if (count := comparison.count(verdict))
    )
    total = f"{counted(len(comparison.vbuckets), 'vbucket')}: {counts}"
    tables = counted(len(comparison.collections), "collection")
    console.print(f"{total}; {counted(comparison.documents, 'document')} in {tables}", soft_wrap=True)


def _table(rows: list[VBucketComparison]) -> Table:
    table = Table("vbucket", "", "seqno", "seqno in tables", "documents", "in tables", "digest", "of tables")
    for one in rows:
        table.add_row(
            str(one.vbucket),
            f"[{_STYLES[one.verdict]}]{one.verdict}[/]",
            str(one.bucket_seqno),
            str(one.table_seqno),
            str(one.bucket_documents),
            str(one.table_documents),
            one.bucket_digest[:12],
            one.table_digest[:12],
        )
    return table
