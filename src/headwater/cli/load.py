"""`headwater load`: write the documents of a file, or generated ones, to a bucket, fast."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headwater import __version__
from headwater.cli.connection_options import EXIT_FAILED, connection_options, credentials, tls_settings
from headwater.cli.frame_view import printable
from headwater.cli.load_sources import FileFormat, FileSource, open_source
from headwater.client.client_settings import ClientSettings
from headwater.client.connection_string import ConnectionString
from headwater.client.generated_documents import VALUE_BYTES, VALUE_BYTES_MIN, GeneratedDocuments
from headwater.client.key_template import KeyTemplate
from headwater.client.kv_cluster import KvCluster
from headwater.client.kv_loader import CONNECTIONS, CONNECTIONS_MAX, KvLoader
from headwater.errors import HeadwaterError
from headwater.protocol.limits import VALUE_BYTES_MAX

EXIT_INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""

KEY_TEMPLATE = "doc::{#}"
PROGRESS_EVERY_S = 0.1
RELATIVE_EXPIRY_S_MAX = 30 * 24 * 60 * 60
"""A server takes a larger number for a date."""

EXPIRY_S_MAX = 50 * 365 * 24 * 60 * 60


def _parse_delimiter(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value == "\\t":
        return "\t"
    if value is not None and (len(value) != 1 or not value.isascii() or value in '"\r\n'):
        raise click.BadParameter(f"{value!r} is no single sign, such as ; or \\t.")
    return value


@click.command()
@click.argument("url")
@click.argument("file", metavar="[FILE]", required=False, type=click.File("rb"))
@click.option(
    "--generate", type=click.IntRange(min=1), metavar="N", help="Make up N documents instead of reading FILE."
)
@click.option(
    "--value-bytes",
    type=click.IntRange(min=VALUE_BYTES_MIN, max=VALUE_BYTES_MAX),
    default=VALUE_BYTES,
    show_default=True,
    help="The size of a generated document.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Other generated documents with another seed.")
@click.option(
    "--collection",
    "collections",
    multiple=True,
    metavar="SCOPE.COLLECTION",
    help="Where to write. Given several times, the documents are dealt out in turn.  [default: _default._default]",
)
@click.option(
    "--key",
    "template",
    default=KEY_TEMPLATE,
    show_default=True,
    metavar="TEMPLATE",
    help="The key of a document: {id} is a field of it, {#} the number of its line or row.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([choice.value for choice in FileFormat]),
    help="What FILE is. Told by the end of its name unless given.",
)
@click.option(
    "--delimiter",
    metavar="SIGN",
    callback=_parse_delimiter,
    help="What stands between the cells of a CSV file.  [default: a comma; a tab in a .tsv file]",
)
@click.option(
    "--text", "texts", multiple=True, metavar="COLUMN", help="Take this column of a CSV file as text; repeat for more."
)
@click.option("--expiry", type=click.IntRange(min=0, max=EXPIRY_S_MAX), default=0, help="Seconds the documents live.")
@click.option(
    "--connections",
    type=click.IntRange(min=1, max=CONNECTIONS_MAX),
    default=CONNECTIONS,
    show_default=True,
    help="Connections to each node.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@connection_options
def load(
    url: str,
    file: io.BufferedReader | None,
    generate: int | None,
    value_bytes: int,
    seed: int,
    collections: tuple[str, ...],
    template: str,
    format_name: str | None,
    delimiter: str | None,
    texts: tuple[str, ...],
    expiry: int,
    connections: int,
    as_json: bool,
    user: str | None,
    password: str | None,
    tls_ca: Path | None,
    tls_skip_verify: bool,
) -> None:
    """Write documents to a bucket.

    URL is couchbase://host[:port]/bucket, or couchbases:// for TLS. FILE has one JSON document a line, or it is a CSV
    file with a header or a Parquet file, of which each row becomes a document; - reads standard input. The documents
    are written over what is there.

    The exit code is 1 if not everything was written: standard error says why, and how many documents were. It is 2 for
    a wrong command line, and 130 after Ctrl-C.

    \b
    Examples:
      headwater load couchbase://localhost/default users.jsonl --key 'user::{id}'
      headwater load couchbase://localhost/default users.csv --key 'user::{id}' --text zip
      headwater load couchbase://localhost/default trips.parquet
      headwater load couchbase://localhost/default --generate 1000000
      headwater load couchbase://localhost/default - --collection shop.orders
    """
    if (file is None) == (generate is None):
        raise click.UsageError("Give either FILE or --generate N.")
    report = _Report(as_json=as_json)
    try:
        keys = KeyTemplate.parse(template)
        where = ConnectionString.parse(url)
        settings = ClientSettings.of(
            where,
            credentials(where, user, password),
            tls=tls_settings(tls_ca, tls_skip_verify),
            agent=f"headwater-load/{__version__}",
        )
        cluster = KvCluster(settings)
        source: FileSource | GeneratedDocuments
        if file is not None:
            format_ = FileFormat(format_name) if format_name else None
            source = open_source(file, keys, format_=format_, delimiter=delimiter, texts=texts)
        else:
            source = GeneratedDocuments(generate or 0, keys, value_bytes=value_bytes, seed=seed)
        with cluster.connect() as connection:
            cluster_map = cluster.map_of(connection)
            ids = cluster.collection_ids(connection, collections)
        report.loader = KvLoader(cluster, cluster_map, collections=ids, connections=connections, expiry=_expiry(expiry))
        progress = _progress(report.loader, source, file, generate, shown=not as_json)
        with report.loader, progress as on_progress:
            report.loader.load(source.batches(), on_progress)
    except KeyboardInterrupt:
        report.tell_failure("interrupted", exit_code=EXIT_INTERRUPTED)
    except HeadwaterError as error:
        report.tell_failure(str(error))
    except OSError as error:
        report.tell_failure(f"the input can't be read: {error.strerror or error}")
    report.tell()


def _expiry(expiry_s: int) -> int:
    """As the protocol has it: seconds from now while that is unambiguous, else the date."""
    return expiry_s if expiry_s <= RELATIVE_EXPIRY_S_MAX else int(time.time()) + expiry_s


# --- the result ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """What is said at the end."""

    as_json: bool
    loader: KvLoader | None = None

    @property
    def documents(self) -> int:
        return self.loader.written if self.loader else 0

    def tell(self) -> None:
        assert self.loader is not None
        if self.as_json:
            self._tell_json(None)
            return
        seconds = self.loader.elapsed_s
        click.echo(
            f"{_documents(self.documents)} in {seconds:.2f} s: {_rate(self.documents, seconds):,.0f} documents/s, "
            f"{_rate(self.loader.written_bytes, seconds) / 1e6:,.1f} MB/s"
        )

    def tell_failure(self, reason: str, *, exit_code: int = EXIT_FAILED) -> None:
        """Say what happened and how far it came, and leave."""
        click.echo(f"Error: {printable(reason)}", err=True)
        click.echo(f"{_documents(self.documents)} {'was' if self.documents == 1 else 'were'} written", err=True)
        if self.as_json:
            self._tell_json(reason)
        sys.exit(exit_code)

    def _tell_json(self, error: str | None) -> None:
        seconds = self.loader.elapsed_s if self.loader else 0.0
        written_bytes = self.loader.written_bytes if self.loader else 0
        result = {
            "documents": self.documents,
            "seconds": round(seconds, 6),
            "documents_per_s": round(_rate(self.documents, seconds), 1),
            "bytes": written_bytes,
            "mb_per_s": round(_rate(written_bytes, seconds) / 1e6, 3),
            "retries": self.loader.retried if self.loader else 0,
            "error": error,
        }
        click.echo(json.dumps(result))


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


# --- the bar ------------------------------------------------------------------------------------------------------


def _progress(
    loader: KvLoader,
    source: FileSource | GeneratedDocuments,
    file: io.BufferedReader | None,
    generate: int | None,
    *,
    shown: bool,
) -> AbstractContextManager[Callable[[], None]]:
    """What is to be called as the load goes on: it moves the bar, if there is a terminal to show it on."""
    if not shown or not sys.stderr.isatty():
        return nullcontext(lambda: None)
    return _Bar(loader, source, total=generate if file is None else _size_bytes(file))


def _size_bytes(file: io.BufferedReader) -> int | None:
    """The size of a regular file; None for a pipe."""
    try:
        status = os.fstat(file.fileno())
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class _Bar(AbstractContextManager[Callable[[], None]]):
    """The progress bar. A file is measured by what was read of it, generated documents by their number."""

    def __init__(self, loader: KvLoader, source: FileSource | GeneratedDocuments, *, total: int | None) -> None:
        self._loader = loader
        self._source = source
        self._shown_s = 0.0
        self._progress = Progress(
            TextColumn("loading"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[documents]} documents, {task.fields[rate]}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, documents="0", rate="0")

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < PROGRESS_EVERY_S:
            return
        self._shown_s = now_s
        written = self._loader.written
        done = written if isinstance(self._source, GeneratedDocuments) else self._source.bytes_read
        rate = _rate(written, self._loader.elapsed_s)
        self._progress.update(self._task, completed=done, documents=f"{written:,}", rate=f"{rate:,.0f}")
