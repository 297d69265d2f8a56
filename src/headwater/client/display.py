"""How clients and batches look at a prompt and in a notebook.

A representation says what is known and asks no server. All that comes from a server or a user is escaped before it
becomes HTML, and a password is never part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pyarrow as pa

from headwater.client.bootstrap import BucketView
from headwater.client.settings import ClientSettings
from headwater.phrases import counted, escaped_bytes

COLLECTIONS_SHOWN_MAX = 20
ROWS_SHOWN_MAX = 10
VALUE_BYTES_SHOWN_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientView:
    """What is shown of a client."""

    settings: ClientSettings
    bucket: BucketView | None
    """None before the client has connected."""
    is_closed: bool
    reads: tuple[str, ...]
    """What is read, and how far each read is."""

    def text(self) -> str:
        reads = "".join(f"; reads {read}" for read in self.reads)
        return f"<Client of {self.settings.bucket} at {self._hosts}{self._user}, {self._state}{reads}>"

    def html(self) -> str:
        rows = [("bucket", self.settings.bucket), ("at", f"{self._hosts}{self._user}"), ("state", self._state)]
        if self.bucket is not None:
            rows.append(("collections", self._collections(self.bucket)))
        rows.extend(("reads", read) for read in self.reads)
        return _table((), rows)

    @property
    def _hosts(self) -> str:
        return ", ".join(map(str, self.settings.addresses))

    @property
    def _user(self) -> str:
        credentials = self.settings.credentials
        return "" if credentials is None else f" as {credentials.user}"

    @property
    def _state(self) -> str:
        if self.is_closed:
            return "closed"
        if self.bucket is None:
            return "not connected yet"
        nodes = counted(len(self.bucket.cluster_map.nodes), "node")
        collections = counted(sum(1 for _ in self.bucket.manifest.collections()), "collection")
        return f"{counted(self.bucket.cluster_map.vbuckets, 'vbucket')} on {nodes}, {collections}"

    def _collections(self, bucket: BucketView) -> str:
        names = [f"{scope.name}.{collection.name}" for scope, collection in bucket.manifest.collections()]
        more = len(names) - COLLECTIONS_SHOWN_MAX
        return ", ".join(names[:COLLECTIONS_SHOWN_MAX]) + (f" and {more:,} more" if more > 0 else "")


# --- batches ------------------------------------------------------------------------------------------------------

_SHOWN = ("changed_at", "op", "scope", "collection", "key", "value", "vbucket", "seqno")


def show_batches_in_notebooks() -> None:
    """Let a notebook show batches of changes as tables. Where there is none, or it has its own way, nothing is done.

    Batches are of Arrow's own class, which can't be given a `_repr_html_`.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    formatter = getattr(shell, "display_formatter", None)
    if formatter is not None and formatter.formatters["text/html"].for_type(pa.RecordBatch) is None:
        formatter.formatters["text/html"].for_type(pa.RecordBatch, batch_html)


def batch_html(batch: pa.RecordBatch) -> str | None:
    """The first rows of a batch; None for a batch of something else than changes, which is shown as text.

    Every vbucket sends the events of collections and scopes, a thousand times the same: they are counted.
    """
    if not {*_SHOWN} <= {*batch.schema.names}:
        return None
    # It takes long to import, and most programs show no batch.
    import pyarrow.compute as pc

    is_event = pc.match_substring_regex(batch.column("op").cast(pa.string()), "^(collection|scope)_")
    changes = batch.select(_SHOWN).filter(pc.invert(is_event))
    rows = [[_cell(name, row[name]) for name in _SHOWN] for row in changes.slice(0, ROWS_SHOWN_MAX).to_pylist()]
    shown = f", the first {len(rows)} of them shown" if changes.num_rows > len(rows) else ""
    events = counted(batch.num_rows - changes.num_rows, "event")
    return f"{_table(_SHOWN, rows)}<p>{counted(changes.num_rows, 'change')}{shown}; {events} of collections.</p>"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "changed_at":
        return str(value.strftime("%Y-%m-%d %H:%M:%S"))
    if isinstance(value, bytes):
        shown = escaped_bytes(value[:VALUE_BYTES_SHOWN_MAX])
        return f"{shown} … ({len(value):,} bytes)" if len(value) > VALUE_BYTES_SHOWN_MAX else shown
    return str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Without a head, the first cell of each row is its name."""
    first = "td" if head else "th"
    body = "".join(f"<tr>{_tag(first, row[0])}{''.join(_tag('td', cell) for cell in row[1:])}</tr>" for row in rows)
    names = f"<thead><tr>{''.join(_tag('th', name) for name in head)}</tr></thead>" if head else ""
    return f"<table>{names}<tbody>{body}</tbody></table>"


def _tag(name: str, text: str) -> str:
    return f'<{name} style="text-align: left">{escape(text)}</{name}>'
