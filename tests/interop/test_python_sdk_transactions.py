"""Transactions of the Python SDK, on one node and on three: every operation, over every state that a key can be in.

The SDK stages what a transaction writes in extended attributes, of tombstones too, and a second transaction that meets
such a document has to notice. So these tests are about sub-documents of deleted documents more than about anything
else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.exceptions import DocumentExistsException, DocumentNotFoundException, TransactionFailed
from couchbase.options import GetOptions, TransactionGetOptions, TransactionInsertOptions, TransactionReplaceOptions
from couchbase.transactions import AttemptContext
from couchbase.transcoder import RawBinaryTranscoder
from deltalake import DeltaTable

import headwater.landing
from support.node_process import PASSWORD, USER, NodeProcess

Logic = Callable[[AttemptContext], Any]


@pytest.fixture
def run(any_cluster: Cluster) -> Callable[[Logic], Any]:
    def run_transaction(logic: Logic) -> Any:
        return any_cluster.transactions.run(logic)

    return run_transaction


def content(documents: Collection, key: str) -> Any:
    return documents.get(key).content_as[dict]


def is_gone(documents: Collection, key: str) -> bool:
    return not documents.exists(key).exists


def test_insert_replace_remove(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    """All of them in one transaction, and nothing of it is left beside the documents."""
    documents.upsert(f"{key}-replaced", {"n": 1})
    documents.upsert(f"{key}-removed", {"n": 1})

    def logic(ctx: AttemptContext) -> None:
        ctx.insert(documents, f"{key}-inserted", {"n": 2})
        ctx.replace(ctx.get(documents, f"{key}-replaced"), {"n": 2})
        ctx.remove(ctx.get(documents, f"{key}-removed"))
        assert ctx.get(documents, f"{key}-inserted").content_as[dict] == {"n": 2}

    run(logic)
    assert content(documents, f"{key}-inserted") == content(documents, f"{key}-replaced") == {"n": 2}
    assert is_gone(documents, f"{key}-removed")


def test_binary_documents(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    """They are staged in attributes that are not JSON, and become the body as they are."""
    raw: dict[str, Any] = {"transcoder": RawBinaryTranscoder()}
    documents.upsert(f"{key}-replaced", {"n": 1})

    def logic(ctx: AttemptContext) -> None:
        ctx.insert(documents, f"{key}-inserted", bytes(range(256)), TransactionInsertOptions(**raw))
        staged = ctx.get(documents, f"{key}-inserted", TransactionGetOptions(**raw))
        assert staged.content_as[bytes] == bytes(range(256))
        ctx.replace(ctx.get(documents, f"{key}-replaced"), b"\xff\x00", TransactionReplaceOptions(**raw))

    run(logic)
    assert documents.get(f"{key}-inserted", GetOptions(**raw)).content_as[bytes] == bytes(range(256))
    assert documents.get(f"{key}-replaced", GetOptions(**raw)).content_as[bytes] == b"\xff\x00"


def test_insert_over_a_tombstone(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    documents.upsert(key, {"n": 1})
    documents.remove(key)
    run(lambda ctx: ctx.insert(documents, key, {"n": 2}))
    assert content(documents, key) == {"n": 2}


def test_changing_what_a_transaction_inserted(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    def logic(ctx: AttemptContext) -> None:
        ctx.replace(ctx.insert(documents, f"{key}-replaced", {"n": 1}), {"n": 2})
        ctx.remove(ctx.insert(documents, f"{key}-removed", {"n": 1}))
        ctx.insert(documents, f"{key}-removed", {"n": 3})

    run(logic)
    assert content(documents, f"{key}-replaced") == {"n": 2}
    assert content(documents, f"{key}-removed") == {"n": 3}


def test_replacing_what_a_transaction_replaced(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    documents.upsert(key, {"n": 0})

    def logic(ctx: AttemptContext) -> None:
        ctx.replace(ctx.replace(ctx.get(documents, key), {"n": 1}), {"n": 2})

    run(logic)
    assert content(documents, key) == {"n": 2}


def test_a_rollback_leaves_everything_as_it_was(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    documents.upsert(f"{key}-replaced", {"n": 1})
    documents.upsert(f"{key}-removed", {"n": 1})

    def logic(ctx: AttemptContext) -> None:
        ctx.insert(documents, f"{key}-inserted", {"n": 2})
        ctx.replace(ctx.get(documents, f"{key}-replaced"), {"n": 2})
        ctx.remove(ctx.get(documents, f"{key}-removed"))
        raise RuntimeError("the application changes its mind")

    with pytest.raises(TransactionFailed):
        run(logic)
    assert is_gone(documents, f"{key}-inserted")
    assert content(documents, f"{key}-replaced") == content(documents, f"{key}-removed") == {"n": 1}
    # What was staged is gone too: a write that knows nothing of transactions meets no trace of it.
    documents.insert(f"{key}-inserted", {"n": 3})
    assert content(documents, f"{key}-inserted") == {"n": 3}


def test_errors_that_a_transaction_can_catch(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    documents.upsert(key, {"n": 1})

    def logic(ctx: AttemptContext) -> None:
        with pytest.raises(DocumentNotFoundException):
            ctx.get(documents, f"{key}-none")
        with pytest.raises(DocumentExistsException):
            ctx.insert(documents, key, {"n": 2})

    run(logic)
    assert content(documents, key) == {"n": 1}


@pytest.mark.parametrize("has_written", [False, True], ids=["after its read", "after its write"])
def test_two_transactions_on_one_document(
    any_cluster: Cluster, run: Callable[[Logic], Any], documents: Collection, key: str, has_written: bool
) -> None:
    """One of them fails, which the Python SDK leaves to the application, and succeeds when it is run again."""
    documents.upsert(key, {"n": 0})

    def add(amount: int) -> Logic:
        return lambda ctx: ctx.replace(found := ctx.get(documents, key), {"n": found.content_as[dict]["n"] + amount})

    def first(ctx: AttemptContext) -> None:
        found = ctx.get(documents, key)
        if has_written:
            ctx.replace(found, {"n": 1})
            with pytest.raises(TransactionFailed):
                any_cluster.transactions.run(add(10))
        else:
            any_cluster.transactions.run(add(10))
            ctx.replace(found, {"n": 1})

    if has_written:
        run(first)
        assert content(documents, key) == {"n": 1}
        run(add(10))
    else:
        with pytest.raises(TransactionFailed):
            run(first)
        assert content(documents, key) == {"n": 10}
        run(add(1))
    assert content(documents, key) == {"n": 11}


def test_their_records_are_not_landed(cluster: Cluster, sdk_node: NodeProcess, tmp_path: Path) -> None:
    """Documents are landed as transactions leave them, staged ones as they were before; `verify` finds all equal, while
    the SDK goes on writing records of its own."""
    documents = cluster.bucket("other").default_collection()
    for name in ("replaced", "removed", "staged"):
        documents.upsert(name, {"n": 1})

    def logic(ctx: AttemptContext) -> None:
        ctx.insert(documents, "inserted", {"n": 2})
        ctx.replace(ctx.get(documents, "replaced"), {"n": 2})
        ctx.remove(ctx.get(documents, "removed"))

    url, login = f"{sdk_node.url}/other", {"user": USER, "password": PASSWORD}

    def land(name: str, **options: Any) -> dict[str, Any]:
        """What `n` is, by key."""
        headwater.landing.land(url, str(tmp_path / name), xattrs=True, **options, **login).awaitTermination()
        found = headwater.landing.verify(url, str(tmp_path / name), **login)
        assert found.is_equal, found.sentence
        assert found.pending == 0 or options
        rows = DeltaTable(tmp_path / name / "documents" / "_default._default").to_pyarrow_table().to_pylist()
        return {row["key"]: json.loads(row["document"] or "{}").get("n") for row in rows}

    cluster.transactions.run(logic)
    committed = {"inserted": 2, "replaced": 2, "staged": 1}
    assert land("lake") == committed
    changes = DeltaTable(tmp_path / "lake" / "changes").to_pyarrow_table(columns=["key"]).column("key").to_pylist()
    assert changes
    assert not [key for key in changes if key is not None and key.startswith("_txn:")]
    everything = land("everything", system=True)
    assert any(key.startswith("_txn:atr-") for key in everything)
    assert "_txn:client-record" in everything
    assert everything.items() >= committed.items()

    def staging(ctx: AttemptContext) -> None:
        ctx.insert(documents, "new", {"n": 3})
        ctx.replace(ctx.get(documents, "staged"), {"n": 3})
        assert land("lake") == committed

    cluster.transactions.run(staging)
    assert land("lake") == {**committed, "new": 3, "staged": 3}


def test_a_plain_write_between_read_and_write(run: Callable[[Logic], Any], documents: Collection, key: str) -> None:
    documents.upsert(key, {"n": 0})

    def logic(ctx: AttemptContext) -> None:
        found = ctx.get(documents, key)
        documents.upsert(key, {"n": 5})
        ctx.replace(found, {"n": 1})

    with pytest.raises(TransactionFailed):
        run(logic)
    assert content(documents, key) == {"n": 5}
