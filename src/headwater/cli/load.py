"""`headwater load`: write the documents of files, or generated ones, to a bucket, fast."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headwater import __version__
from headwater.cli.management import BucketScopes, ManagedNode, ManagementUrl
from headwater.cli.options import EXIT_FAILED, GivenOptions, LoginOptions, connection_options, options_from
from headwater.cli.output import click, documents_in, exit_code_after
from headwater.client.blocking_bucket import KvCluster
from headwater.errors import HeadwaterError, InvalidInput, UnknownCollection, UnknownScope
from headwater.options import option
from headwater.phrases import counted, printable
from headwater.protocol.numbers import RELATIVE_EXPIRY_S_MAX, VALUE_BYTES_MAX
from headwater.transfer import inputs
from headwater.transfer.key_template import VALUE_BYTES, VALUE_BYTES_MIN, GeneratedDocuments, KeyTemplate
from headwater.transfer.loader import CONNECTIONS, CONNECTIONS_MAX, KvLoader

if TYPE_CHECKING:
    from headwater.transfer.inputs import FileSource

# --- the report at the end ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """The totals over all files."""

    as_json: bool
    loaders: list[KvLoader] = field(default_factory=list)

    @property
    def documents(self) -> int:
        return sum(loader.written for loader in self.loaders)

    @property
    def written_bytes(self) -> int:
        return sum(loader.written_bytes for loader in self.loaders)

    @property
    def seconds(self) -> float:
        return sum(loader.elapsed_s for loader in self.loaders)

    def per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0

    def print(self) -> None:
        if self.as_json:
            self._print_json(None)
            return
        megabytes = f", {self.per_second(self.written_bytes) / 1e6:,.1f} MB/s"
        click.echo(documents_in(self.documents, self.seconds, and_rate=megabytes))

    def fail(self, reason: str, *, exit_code: int = EXIT_FAILED) -> None:
        """Print the reason and how many documents were written, and exit."""
        click.echo(f"Error: {printable(reason)}", err=True)
        verb = "was" if self.documents == 1 else "were"
        click.echo(f"{counted(self.documents, 'document')} {verb} written", err=True)
        if self.as_json:
            self._print_json(reason)
        sys.exit(exit_code)

    def _print_json(self, error: str | None) -> None:
        result = {
            "documents": self.documents,
            "seconds": round(self.seconds, 6),
            "documents_per_s": round(self.per_second(self.documents), 1),
            "bytes": self.written_bytes,
            "mb_per_s": round(self.per_second(self.written_bytes) / 1e6, 3),
            "retries": sum(loader.retried for loader in self.loaders),
            "error": error,
        }
        click.echo(json.dumps(result))


# --- the bar on a terminal ----------------------------------------------------------------------------------------


SHOW_EVERY_S = 0.1


@contextmanager
def progress_bar(
    report: Report, done: Callable[[], int], *, total: int | None, shown: bool
) -> Iterator[Callable[[], None]]:
    """Yields a function that the loader calls as it proceeds. It updates the bar, if there is a terminal.

    `done` returns how much of `total` is done: the bytes read of a file, or the number of generated documents written.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    shown_s = 0.0

    def show() -> None:
        nonlocal shown_s
        if (now_s := time.monotonic()) - shown_s >= SHOW_EVERY_S:
            shown_s = now_s
            written = report.documents
            progress.update(task, completed=done(), documents=f"{written:,}", rate=f"{report.per_second(written):,.0f}")

    columns = (
        *(TextColumn("loading"), BarColumn(), TaskProgressColumn()),
        *(TextColumn("{task.fields[documents]} documents, {task.fields[rate]}/s"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, documents="0", rate="0")
        yield show


EXPIRY_S_MAX = 50 * 365 * 24 * 60 * 60


def parse_delimiter(value: str) -> str:
    """Parse the character between the cells of a CSV file."""
    if value == "\\t":
        return "\t"
    if len(value) != 1 or not value.isascii() or value in '"\r\n':
        raise click.BadParameter(f"{value!r} is no single sign, such as ; or \\t.")
    return value


class FileOrFolder(click.File):
    """Converts an argument to an open file, or to the path of a folder."""

    name = "file"

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value != "-" and Path(value).is_dir():
            return Path(value)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of the command."""

    generate: int | None = option("Generate N documents instead of reading FILE.", least=1)
    value_bytes: int = option(
        "The size of a generated document.",
        VALUE_BYTES,
        cli_type=click.IntRange(min=VALUE_BYTES_MIN, max=VALUE_BYTES_MAX),
    )
    seed: int = option("Seed of the generated documents.", 0)
    collections: tuple[str, ...] = option(
        "The collection to write to. Repeat to distribute the documents over several collections.  "
        "[default: _default._default]",
        cli_name="--collection",
        metavar="SCOPE.COLLECTION",
    )
    create_collections: bool = option("Create collections of DIR that do not exist. Requires an admin.", False)
    template: str | None = option(
        "Template for the keys: {id} is a field of the document, {#} the number of its line or row.  "
        f"[default: {inputs.KEY_TEMPLATE}; in an export, what it has]",
        cli_name="--key",
        metavar="TEMPLATE",
    )
    format_name: str | None = option(
        "The format of FILE. By default, its extension decides.",
        cli_name="--format",
        cli_type=click.Choice([choice.value for choice in inputs.FileFormat]),
    )
    delimiter: str | None = option(
        "The delimiter of a CSV file.  [default: a comma; a tab in a .tsv file]",
        metavar="SIGN",
        cli_type=parse_delimiter,
    )
    texts: tuple[str, ...] = option(
        "Read this column of a CSV file as text. Repeat for more.", cli_name="--text", metavar="COLUMN"
    )
    expiry_s: int | None = option(
        "Time to live in seconds, 0 for no limit.  [default: no limit; in an export, what it has]",
        least=0,
        most=EXPIRY_S_MAX,
        cli_name="--expiry",
    )
    connections: int = option("Connections to each node.", CONNECTIONS, least=1, most=CONNECTIONS_MAX)
    as_json: bool = option("Print the result as one JSON object.", False, cli_name="--json")


@click.command()
@click.argument("url")
@click.argument("file", metavar="[FILE|DIR]", required=False, type=FileOrFolder())
@options_from(LoadOptions)
@connection_options
def load(url: str, file: io.BufferedReader | Path | None, given: GivenOptions, login: LoginOptions) -> None:
    """Write documents to a bucket.

    URL is couchbase://host[:port]/bucket, or couchbases:// for TLS. FILE has one JSON document per line, or it is a CSV
    file with a header or a Parquet file, whose rows become documents; - reads standard input. Existing documents are
    overwritten.

    Files of `headwater export` are recognised by their first bytes, `_key`, and restored: the key, and from JSON lines
    also flags, expiry and values that are not JSON. The files of a folder DIR are loaded into the collections they are
    named after, which must exist unless --create-collections is given. With --key, they are treated like other files.

    The exit code is 1 if not everything was written; standard error says why, and how many documents were written. It
    is 2 for an invalid command line, and 130 after Ctrl-C.

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
    asked = given.make(LoadOptions)
    _check_usage(file, asked)
    report, template, expiry_s = Report(as_json=asked.as_json), asked.template, asked.expiry_s
    try:
        keys = None if template is None else KeyTemplate.parse(template)
        settings = login.settings(url, agent=f"headwater-load/{__version__}")
        loading = _Loading(KvCluster(settings), report, connections=asked.connections, expiry=_expiry(expiry_s or 0))
        if file is None:
            made_of = keys or KeyTemplate.parse(inputs.KEY_TEMPLATE)
            count = asked.generate or 0
            generated = GeneratedDocuments(count, made_of, value_bytes=asked.value_bytes, seed=asked.seed)
            loading.load(generated, asked.collections, done=lambda: report.documents, total=count)
        else:
            format_ = inputs.FileFormat(asked.format_name) if asked.format_name else None
            files: Iterable[inputs.LoadedFile] = (
                [inputs.LoadedFile(file, asked.collections)] if not isinstance(file, Path) else ()
            )
            if isinstance(file, Path):
                by_collection = inputs.files_in(file, format_)
                if asked.create_collections:
                    BucketScopes(ManagedNode(where=ManagementUrl.parse(url), login=login)).create_missing(by_collection)
                loading.check(tuple(by_collection))
                files = inputs.opened(by_collection)
            own_expiry = None if expiry_s is None else _expiry(expiry_s)
            for loaded in files:
                with loaded.named_in_errors():
                    source = inputs.open_source(
                        loaded.file,
                        keys,
                        format_=format_,
                        delimiter=asked.delimiter,
                        texts=asked.texts,
                        expiry=own_expiry,
                    )
                    loading.load(source, loaded.collections, done=_bytes_read(source), total=loaded.size_bytes)
    except KeyboardInterrupt as error:
        report.fail("interrupted", exit_code=exit_code_after(error))
    except HeadwaterError as error:
        report.fail(str(error))
    except OSError as error:
        report.fail(f"the input can't be read: {error.strerror or error}")
    report.print()


def _check_usage(file: io.BufferedReader | Path | None, asked: LoadOptions) -> None:
    if (file is None) == (asked.generate is None):
        raise click.UsageError("Give either FILE or --generate N.")
    if isinstance(file, Path) and asked.collections:
        raise click.UsageError("The files of a folder go to the collections they are named after: no --collection.")
    if asked.create_collections and not isinstance(file, Path):
        raise click.UsageError("--create-collections is for a folder, whose files name them.")


def _bytes_read(source: FileSource) -> Callable[[], int]:
    return lambda: source.bytes_read


class _Loading:
    """Writes the documents of several sources to one cluster."""

    def __init__(self, cluster: KvCluster, report: Report, *, connections: int, expiry: int) -> None:
        self._cluster = cluster
        self._report = report
        self._connections = connections
        self._expiry = expiry

    def check(self, collections: tuple[str, ...]) -> None:
        """Raise an error if one of the collections does not exist, before anything is written."""
        try:
            self._cluster.find(collections)
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
        cluster_map, ids = self._cluster.find(collections)
        loader = KvLoader(
            self._cluster, cluster_map, collections=ids, connections=self._connections, expiry=self._expiry
        )
        self._report.loaders.append(loader)
        shown = not self._report.as_json
        with loader, progress_bar(self._report, done, total=total, shown=shown) as on_progress:
            loader.load(source.batches(), on_progress)


def _expiry(expiry_s: int) -> int:
    """Return an expiry in the protocol's form: seconds from now if that is unambiguous, otherwise the date."""
    return expiry_s if expiry_s <= RELATIVE_EXPIRY_S_MAX else int(time.time()) + expiry_s
