"""`headwater export`: write the live documents of a bucket to files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headwater import __version__
from headwater.cli import options
from headwater.cli.options import EXIT_FAILED, GivenOptions, LoginOptions, connection_options, errors_reported
from headwater.cli.output import click, documents_in, exit_code_after
from headwater.client.blocking_client import Client
from headwater.client.read_options import ReadOptions
from headwater.errors import InvalidInput
from headwater.options import option
from headwater.phrases import counted, printable
from headwater.transfer.export_files import DocumentSpool, JsonLinesFile, LeftOut, OutputFiles, TableFile, scan_columns
from headwater.transfer.inputs import FileFormat
from headwater.transfer.json_lines import KEY_MEMBER

_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of the command, except those that choose what to read."""

    format_name: str | None = option(
        "The file format. By default, the extension of FILE decides; in a directory it is jsonl.",
        cli_name="--format",
        cli_type=click.Choice([choice.value for choice in FileFormat]),
    )
    no_key: bool = option(f"Do not write the keys, which are otherwise in {KEY_MEMBER}.", False)
    overwrite: bool = option("Replace existing files.", False)
    as_json: bool = option("Print the result as one JSON object.", False, cli_name="--json")
    quiet: bool = option("Do not show progress.", False, cli_also=("-q",))


@click.command()
@click.argument("url")
@click.option(
    "--into",
    required=True,
    metavar="FILE|DIR",
    type=click.Path(path_type=Path),
    help="A file for one collection, or a directory with one file per collection.",
)
@options.read_options("export")
@options.options_from(ExportOptions)
@connection_options
@errors_reported
def export(
    url: str,
    into: Path,
    collections: tuple[str, ...],
    scopes: tuple[str, ...],
    given: GivenOptions,
    login: LoginOptions,
) -> None:
    """Write the live documents of a bucket to files.

    Exports the documents that the bucket holds when the command starts, or newer versions of them. A file appears when
    it is complete, and `headwater load` can read it.

    A JSON line is the document, with its key as the first member `_key`. `_flags` follows if the flags are not those of
    JSON (33554432), and `_expiry`, in seconds since 1970, if there is one. A document that is not an object, or that
    has a member of such a name, is in `_value`. A value that is not JSON is in `_value_base64`, and a key that is not
    UTF-8 in `_key_base64`, both in base64.

    In CSV and Parquet, there is a column for `_key` and for every field of the documents; nested fields and fields of
    several kinds are JSON text. Columns have neither flags nor expiry, do not distinguish null from a missing field,
    and CSV does not distinguish "7" from 7. Extended attributes, CAS and revisions are not exported.

    The exit code is 0 if every document was written, 1 if not (standard error says which and why), 2 for an invalid
    command line and 130 after Ctrl-C.

    \b
    Examples:
      headwater export couchbase://localhost/default --into backup/
      headwater export couchbase://localhost/default --into users.parquet \\
        --collection shop.users
      headwater export couchbase://localhost/default --into backup/ --format csv
    """
    settings = login.settings(url, agent=f"headwater-export/{__version__}")
    asked = given.make(ExportOptions)
    format_ = _format(into, asked.format_name)
    shown = not asked.quiet and not asked.as_json
    exported = _Exported()
    try:
        with OutputFiles(into, overwrite=asked.overwrite) as files, _progress(exported, shown=shown):
            spool = DocumentSpool(files.work)
            wanted = ReadOptions.make(end="now", collections=collections, scopes=scopes, name="headwater-export")
            with Client(settings) as client:
                for batch in client.read(wanted):
                    spool.add(batch)
                    exported.read = spool.rows
            _write(spool, files, format_, exported, with_key=not asked.no_key)
            exported.files = files.publish()
    except KeyboardInterrupt as error:
        click.echo("Error: interrupted; nothing was written", err=True)
        sys.exit(exit_code_after(error))
    exported.report(as_json=asked.as_json)
    sys.exit(EXIT_FAILED if exported.left_out.documents else 0)


def _format(into: Path, name: str | None) -> FileFormat:
    by_ending = {f".{choice.value}": choice for choice in FileFormat}.get(into.suffix.lower())
    if name is not None:
        return FileFormat(name)
    return by_ending or FileFormat.JSONL


def _write(
    spool: DocumentSpool, files: OutputFiles, format_: FileFormat, exported: _Exported, *, with_key: bool
) -> None:
    names = [name for name in spool.collections() if next(spool.documents(name), None) is not None]
    if files.is_file and len(names) > 1:
        listed = ", ".join(".".join(name) for name in names[:_NAMES_SHOWN])
        raise InvalidInput(
            f"one file can't hold the documents of {len(names)} collections: {listed}",
            hint="Give a directory, or choose one with --collection",
        )
    if files.is_file and not names:
        with files.open("") as file:
            _sink(file, iter(()), format_, exported, with_key=with_key).end()
    for name in names:
        collection = ".".join(name)
        with files.open(f"{collection}.{format_}") as file:
            sink = _sink(file, spool.documents(name), format_, exported, with_key=with_key)
            exported.by_collection[collection] = 0
            for batch in spool.documents(name):
                exported.by_collection[collection] += sink.write(batch)
            sink.end()


def _sink(
    file: BinaryIO, documents: Iterator[pa.RecordBatch], format_: FileFormat, exported: _Exported, *, with_key: bool
) -> JsonLinesFile | TableFile:
    """Return the writer of a file. For a format with columns, it first reads all documents to find the columns."""
    if format_ is FileFormat.JSONL:
        return JsonLinesFile(file, exported.left_out, with_key=with_key)
    found = scan_columns(documents)
    taken = KEY_MEMBER if with_key else ""
    exported.as_text += found.texts()
    exported.without_column += found.without_column(taken=taken)
    is_parquet = format_ is FileFormat.PARQUET
    columns = found.columns(taken=taken)
    return TableFile(file, exported.left_out, columns, nested=found.nested(), with_key=with_key, is_parquet=is_parquet)


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Exported:
    """The figures that the command shows while it runs and reports at the end."""

    read: int = 0
    by_collection: dict[str, int] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    as_text: list[str] = field(default_factory=list)
    without_column: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def documents(self) -> int:
        return sum(self.by_collection.values())

    def report(self, *, as_json: bool) -> None:
        took_s = time.monotonic() - self._began_s
        for sentence in self._remarks():
            click.echo(printable(sentence), err=True)
        if as_json:
            click.echo(json.dumps(self._as_object(took_s)))
            return
        for path in self.files:
            click.echo(str(path))
        click.echo(documents_in(self.documents, took_s), err=True)

    def _remarks(self) -> Iterator[str]:
        if self.as_text:
            yield f"As JSON text, because nested or of several kinds: {_shown(self.as_text)}"
        if self.without_column:
            yield f"Fields left out, as no column can have their name: {_shown(self.without_column)}"
        for sentence in self.left_out.sentences():
            yield f"Error: {sentence}. {'JSON lines (--format jsonl) hold what columns do not'}"

    def _as_object(self, took_s: float) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "collections": self.by_collection,
            "files": [str(path) for path in self.files],
            "left_out": self.left_out.reasons(),
            "columns_as_text": self.as_text,
            "fields_without_column": self.without_column,
            "seconds": round(took_s, 3),
        }


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


@contextmanager
def _progress(exported: _Exported, *, shown: bool) -> Iterator[None]:
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield
        return
    with Live(get_renderable=lambda: _line(exported), console=console, transient=True):
        yield


def _line(exported: _Exported) -> Text:
    read, written = counted(exported.read, "change"), counted(exported.documents, "document")
    return Text(f"exporting: {read} read, {written} written")
