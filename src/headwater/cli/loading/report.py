"""What `headwater load` tells at its end: how much it has written, and how fast."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

import click

from headwater.cli.connection_options import EXIT_FAILED
from headwater.cli.escaping import printable
from headwater.cli.rates import documents_in
from headwater.client.kv_loader import KvLoader
from headwater.counted import counted


@dataclass(slots=True)
class Report:
    """Sums over all files."""

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

    def tell(self) -> None:
        if self.as_json:
            self._tell_json(None)
            return
        megabytes = f", {self.per_second(self.written_bytes) / 1e6:,.1f} MB/s"
        click.echo(documents_in(self.documents, self.seconds, and_rate=megabytes))

    def tell_failure(self, reason: str, *, exit_code: int = EXIT_FAILED) -> None:
        """Say what happened and how far it came, and leave."""
        click.echo(f"Error: {printable(reason)}", err=True)
        verb = "was" if self.documents == 1 else "were"
        click.echo(f"{counted(self.documents, 'document')} {verb} written", err=True)
        if self.as_json:
            self._tell_json(reason)
        sys.exit(exit_code)

    def _tell_json(self, error: str | None) -> None:
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
