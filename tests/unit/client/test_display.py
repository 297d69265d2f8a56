"""What a client and a batch look like at a prompt and in a notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import headwater
from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.offsets import Offsets
from headwater.client.reading import ClientView, batch_html, show_batches_in_notebooks
from headwater.client.settings import ClientSettings
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.commands import batch_of, document, event

SETTINGS = ClientSettings.make("couchbase://db.example:11210/travel", user="me<b>", password="secret")
BUCKET = BucketView(
    cluster_map=ClusterMap(
        epoch=1,
        revision=1,
        bucket="travel",
        uuid="5ab1",
        nodes=(Address("db.example", 11210),),
        vbucket_nodes=((0,),) * 64,
    ),
    manifest=Manifest(),
    has_collections=True,
)


def test_a_client_says_what_it_is_of_and_how_far_it_is() -> None:
    assert repr(headwater.blocking.Client(SETTINGS)) == (
        "<Client of travel at db.example:11210 as me<b>, not connected yet>"
    )
    view = ClientView(settings=SETTINGS, bucket=BUCKET, is_closed=False, reads=("shop.orders, 3 changes read",))
    assert view.text() == (
        "<Client of travel at db.example:11210 as me<b>, 64 vbuckets on 1 node, 1 collection;"
        " reads shop.orders, 3 changes read>"
    )


def test_html_is_escaped_and_has_no_password() -> None:
    html = ClientView(settings=SETTINGS, bucket=BUCKET, is_closed=False, reads=("a & b",)).html()
    assert "me&lt;b&gt;" in html
    assert "a &amp; b" in html
    assert "_default._default" in html
    assert "secret" not in html


def test_a_batch_shows_its_first_rows() -> None:
    rows = [document(key=b"<b>%d" % number, value=b"x" * 1000) for number in range(30)]
    html = batch_html(batch_of(*[event("collection_created")] * 64, *rows))
    assert html.count("<tr>") == 11
    assert "&lt;b&gt;9" in html
    assert "… (1,000 bytes)" in html
    assert "30 changes, the first 10 of them shown; 64 events of collections." in html
    assert batch_html(pa.record_batch({"other": [1]})) is None, "a batch of something else"


def test_a_notebook_keeps_the_display_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[Any, Any] = {}

    def for_type(kind: type, show: Any = None) -> Any:
        before = shown.get(kind)
        if show is not None:
            shown[kind] = show
        return before

    shell = SimpleNamespace(
        display_formatter=SimpleNamespace(formatters={"text/html": SimpleNamespace(for_type=for_type)})
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    show_batches_in_notebooks()
    assert shown == {pa.RecordBatch: batch_html}
    shown[pa.RecordBatch] = str
    show_batches_in_notebooks()
    assert shown == {pa.RecordBatch: str}


def test_offsets_are_shown_in_a_line() -> None:
    offset = StreamOffset(seqno=Seqno(12), snapshot_start=Seqno(12), snapshot_end=Seqno(12))
    offsets = Offsets("5ab1", {VBucketId(vbucket): offset for vbucket in range(1024)})
    assert repr(offsets) == "<Offsets of 1,024 vbuckets, up to seqno 12, bucket 5ab1>"
