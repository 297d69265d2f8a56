"""`headwater load`: write the documents of a file, or generated ones, to a bucket, fast."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import rich_click as click

from headwater import __version__
from headwater.cli.bucket_scopes import scopes_of
from headwater.cli.connection_options import connection_options, credentials, tls_settings
from headwater.cli.loading.bar import progress_bar
from headwater.cli.loading.inputs import FileOrFolder, LoadedFile, files_in, opened
from headwater.cli.loading.report import Report
from headwater.cli.loading.sources import KEY_TEMPLATE, FileFormat, FileSource, open_source
from headwater.cli.management_options import Access
from headwater.cli.telling import EXIT_INTERRUPTED
from headwater.client.client_settings import ClientSettings
from headwater.client.connection_string import ConnectionString
from headwater.client.generated_documents import VALUE_BYTES, VALUE_BYTES_MIN, GeneratedDocuments
from headwater.client.key_template import KeyTemplate
from headwater.client.kv_cluster import KvCluster
from headwater.client.kv_loader import CONNECTIONS, CONNECTIONS_MAX, KvLoader
from headwater.errors import HeadwaterError, InvalidInput, UnknownCollection, UnknownScope
from headwater.protocol.limits import RELATIVE_EXPIRY_S_MAX, VALUE_BYTES_MAX

EXPIRY_S_MAX = 50 * 365 * 24 * 60 * 60


def _parse_delimiter(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value == "\\t":
        return "\t"
    if value is not None and (len(value) != 1 or not value.isascii() or value in '"\r\n'):
        raise click.BadParameter(f"{value!r} is no single sign, such as ; or \\t.")
    return value


@click.command()
@click.argument("url")
@click.argument("file", metavar="[FILE|DIR]", required=False, type=FileOrFolder())
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
@click.option("--create-collections", is_flag=True, help="Create those of DIR that are not there. For admins.")
@click.option(
    "--key",
    "template",
    metavar="TEMPLATE",
    help="The key of a document: {id} is a field of it, {#} the number of its line or row.  "
    f"[default: {KEY_TEMPLATE}; in an export, what it has]",
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
@click.option(
    "--expiry",
    "expiry_s",
    type=click.IntRange(min=0, max=EXPIRY_S_MAX),
    metavar="S",
    help="Seconds the documents live, 0 for ever.  [default: for ever; in an export, what it has]",
)
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
    file: io.BufferedReader | Path | None,
    generate: int | None,
    value_bytes: int,
    seed: int,
    collections: tuple[str, ...],
    create_collections: bool,
    template: str | None,
    format_name: str | None,
    delimiter: str | None,
    texts: tuple[str, ...],
    expiry_s: int | None,
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

    What `headwater export` has written is known by its first bytes, `_key`, and loaded as it was: the key, and from
    JSON lines also flags, expiry and what is no JSON. A folder DIR of its files goes to the collections that they are
    named after, which must exist, or --create-collections makes them. With --key they are files like others.

    The exit code is 1 if not everything was written: standard error says why, and how many documents were. It is 2 for
    a wrong command line, and 130 after Ctrl-C.

    \b
    Examples:
      headwater load couchbase://localhost/default users.jsonl --key 'user::{id}'
      headwater load couchbase://localhost/default users.csv \\
        --key 'user::{id}' --text zip
      headwater load couchbase://localhost/default trips.parquet
      headwater load couchbase://localhost/default --generate 1000000
      headwater load couchbase://localhost/default - --collection shop.orders
      headwater load couchbase://localhost/default backup/
    """
    _check_usage(file, generate, collections, create_collections=create_collections)
    report = Report(as_json=as_json)
    try:
        keys = None if template is None else KeyTemplate.parse(template)
        where = ConnectionString.parse(url)
        settings = ClientSettings.of(
            where,
            credentials(where, user, password),
            tls=tls_settings(tls_ca, tls_skip_verify),
            agent=f"headwater-load/{__version__}",
        )
        loading = _Loading(KvCluster(settings), report, connections=connections, expiry=_expiry(expiry_s or 0))
        if file is None:
            made_of = keys or KeyTemplate.parse(KEY_TEMPLATE)
            generated = GeneratedDocuments(generate or 0, made_of, value_bytes=value_bytes, seed=seed)
            loading.load(generated, collections, done=lambda: report.documents, total=generate)
        else:
            format_ = FileFormat(format_name) if format_name else None
            files: Iterable[LoadedFile] = [LoadedFile(file, collections)] if not isinstance(file, Path) else ()
            if isinstance(file, Path):
                by_collection = files_in(file, format_)
                if create_collections:
                    access = Access(user=user, password=password, tls_ca=tls_ca, tls_skip_verify=tls_skip_verify)
                    scopes_of(url, access).create_missing(by_collection)
                loading.check(tuple(by_collection))
                files = opened(by_collection)
            own_expiry = None if expiry_s is None else _expiry(expiry_s)
            for given in files:
                with given.named_in_errors():
                    source = open_source(
                        given.file, keys, format_=format_, delimiter=delimiter, texts=texts, expiry=own_expiry
                    )
                    loading.load(source, given.collections, done=_bytes_read(source), total=given.size_bytes)
    except KeyboardInterrupt:
        report.tell_failure("interrupted", exit_code=EXIT_INTERRUPTED)
    except HeadwaterError as error:
        report.tell_failure(str(error))
    except OSError as error:
        report.tell_failure(f"the input can't be read: {error.strerror or error}")
    report.tell()


def _check_usage(
    file: io.BufferedReader | Path | None,
    generate: int | None,
    collections: tuple[str, ...],
    *,
    create_collections: bool,
) -> None:
    if (file is None) == (generate is None):
        raise click.UsageError("Give either FILE or --generate N.")
    if isinstance(file, Path) and collections:
        raise click.UsageError("The files of a folder go to the collections they are named after: no --collection.")
    if create_collections and not isinstance(file, Path):
        raise click.UsageError("--create-collections is for a folder, whose files name them.")


def _bytes_read(source: FileSource) -> Callable[[], int]:
    return lambda: source.bytes_read


class _Loading:
    """Writes what several sources give to one cluster."""

    def __init__(self, cluster: KvCluster, report: Report, *, connections: int, expiry: int) -> None:
        self._cluster = cluster
        self._report = report
        self._connections = connections
        self._expiry = expiry

    def check(self, collections: tuple[str, ...]) -> None:
        """Raise an error where one of the collections is not there, before anything is written."""
        try:
            with self._cluster.connect() as connection:
                self._cluster.collection_ids(connection, collections)
        except (UnknownCollection, UnknownScope) as error:
            raise InvalidInput(error.reason, hint="Create it first, or give --create-collections") from error

    def load(
        self,
        source: FileSource | GeneratedDocuments,
        collections: tuple[str, ...],
        *,
        done: Callable[[], int],
        total: int | None,
    ) -> None:
        with self._cluster.connect() as connection:
            cluster_map = self._cluster.map_of(connection)
            ids = self._cluster.collection_ids(connection, collections)
        loader = KvLoader(
            self._cluster, cluster_map, collections=ids, connections=self._connections, expiry=self._expiry
        )
        self._report.loaders.append(loader)
        shown = not self._report.as_json
        with loader, progress_bar(self._report, done, total=total, shown=shown) as on_progress:
            loader.load(source.batches(), on_progress)


def _expiry(expiry_s: int) -> int:
    """As the protocol has it: seconds from now while that is unambiguous, else the date."""
    return expiry_s if expiry_s <= RELATIVE_EXPIRY_S_MAX else int(time.time()) + expiry_s
