"""`headwater check`: read everything that a stopped node has stored, and report what is not as it was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.cli.output import click
from headwater.errors import DataDamaged, HeadwaterError, StoreError, VBucketDamaged
from headwater.phrases import counted
from headwater.store.checked_engine import Finding, Scrub
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import stored_facts

STEP_BYTES = 64 * 1024 * 1024
EXIT_DAMAGED = 1


@dataclass(slots=True)
class _Checked:
    """The result for one bucket."""

    name: str
    file: Path
    rows: int = 0
    read_bytes: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, error: DataDamaged, finding: Finding | None = None) -> None:
        seqnos = None if finding is None else finding.seqnos
        self.findings.append(
            {
                "bucket": self.name,
                "file": str(self.file),
                "table": None if finding is None else finding.table.value.decode(),
                "vbucket": error.vbucket if isinstance(error, VBucketDamaged) else None,
                "first_seqno": None if seqnos is None else seqnos[0],
                "last_seqno": None if seqnos is None else seqnos[1],
                "reason": error.reason,
                "hint": error.hint,
            }
        )


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print the report as one line of JSON.")
def check(directory: Path, as_json: bool) -> None:
    """Check the stored data of a stopped node.

    DIR is the node's data folder. The command reads every row of every bucket and compares it with its checksum; it
    changes nothing. Each finding is one line, with the file, the table, the vbucket and its seqnos. The exit code is 0
    if all data is intact, and 1 if any is damaged or can't be read. A running node does the same continuously, at a
    limited rate: see `headwater serve --scrub-bytes-per-second`.

    \b
    Example:
      headwater check /var/lib/headwater
    """
    buckets = [_check_bucket(folder) for folder in _bucket_folders(directory)]
    findings = [finding for bucket in buckets for finding in bucket.findings]
    rows, size = sum(bucket.rows for bucket in buckets), sum(bucket.read_bytes for bucket in buckets)
    if as_json:
        click.echo(json.dumps({"buckets": len(buckets), "rows": rows, "bytes": size, "findings": findings}))
    else:
        for finding in findings:
            click.echo(f"{finding['file']}: {finding['reason']}. {finding['hint']}")
        outcome = counted(len(findings), "finding") if findings else "all of it is what was written"
        click.echo(f"{counted(len(buckets), 'bucket')}, {counted(rows, 'row')}, {size:,} bytes: {outcome}")
    if findings:
        raise SystemExit(EXIT_DAMAGED)


def _bucket_folders(directory: Path) -> Iterator[Path]:
    buckets = directory / "buckets"
    if not buckets.is_dir():
        raise click.UsageError(f"{directory} is not the data folder of a node: it has no folder named buckets")
    return (folder for folder in sorted(buckets.iterdir()) if folder.is_dir())


def _check_bucket(folder: Path) -> _Checked:
    checked = _Checked(folder.name, folder / "data.mdb")
    try:
        engine = LmdbEngine(folder, read_only=True)
    except DataDamaged as error:
        checked.add(error)
        return checked
    except StoreError as error:
        raise click.ClickException(str(error)) from error
    try:
        stored_facts(engine)  # Raises if the data has another format version.
        scrub = Scrub(engine, folder.name)
        while not scrub.is_done:
            for finding in scrub.step(STEP_BYTES):
                checked.add(finding.error, finding)
        checked.rows, checked.read_bytes = scrub.rows, scrub.read_bytes
    except DataDamaged as error:
        checked.add(error)
    except HeadwaterError as error:
        raise click.ClickException(str(error)) from error
    finally:
        engine.close()
    return checked
