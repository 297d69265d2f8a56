"""The table `HANDLERS`: which function serves which message of a key-value connection.

`kv.session` looks up the handler of a request here after it has checked the rights (`NEEDED`). To serve another
message, write a function that takes a context and the request, and add it to `_SERVED` and to the rights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater.node.auth.users import Action
from headwater.node.kv.handlers import (
    connection,
    dcp,
    range_scan,
    statistics,
    vbuckets,
)
from headwater.node.kv.handlers import documents as document
from headwater.protocol.messages import dcp_streams as dcp_stream_messages
from headwater.protocol.messages import documents, session
from headwater.protocol.messages import subdocument as subdocs
from headwater.protocol.messages import vbuckets as vbucket_messages
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.states import TO_A_CONSUMER, TO_A_PRODUCER, TO_BOTH

# --- the right that each message needs -----------------------------------------------------------------------------


NEEDS_NO_LOGIN: frozenset[type[Request]] = frozenset(
    {
        session.Hello,
        session.SaslListMechanisms,
        session.SaslAuth,
        session.SaslStep,
        session.GetErrorMap,
        session.Noop,
        session.Version,
        session.Quit,
        session.QuitQuiet,
        session.SelectBucket,
        session.GetClusterConfig,
    }
)
"""The handlers of the last two check rights themselves: one request names its bucket, the other may have none."""

_READS = (
    session.Stat, documents.Get, documents.GetMeta, documents.GetRandomKey, documents.RangeScanCreate,
    documents.RangeScanContinue, documents.RangeScanCancel, subdocs.SubdocGet,
    subdocs.MultiLookup, vbucket_messages.GetVBucket, vbucket_messages.GetAllVbSeqnos,
    vbucket_messages.SeqnoPersistence, vbucket_messages.ObserveSeqno, vbucket_messages.Observe,
    dcp_stream_messages.GetFailoverLogByKv,
)  # fmt: skip
_SUBDOC_WRITES = (
    subdocs.SubdocDictAdd, subdocs.SubdocDictUpsert, subdocs.SubdocDelete, subdocs.SubdocReplace,
    subdocs.SubdocArrayPushLast, subdocs.SubdocArrayPushFirst, subdocs.SubdocArrayInsert,
    subdocs.SubdocArrayAddUnique, subdocs.SubdocCounter,
)  # fmt: skip
_WRITES = (
    documents.Set,
    documents.Delete,
    documents.Increment,
    documents.Append,
    documents.Touch,
    documents.GetLocked,
    documents.Unlock,
    *_SUBDOC_WRITES,
    subdocs.MultiMutation,
    documents.SetWithMeta,
)
_ADMINISTERS = (session.Flush, session.Verbosity)
_IS_A_NODE = (vbucket_messages.SetVBucket, vbucket_messages.DeleteVBucket, vbucket_messages.SetCollectionsManifest)
"""Requests that set where a vbucket is active, and the manifest that all nodes share. kv_engine requires the right to
supervise the node (`daemon/mcbp_privileges.cc`), which no bucket admin has: they manage collections over HTTP."""


_USES = (vbucket_messages.GetCollectionsManifest, vbucket_messages.GetCollectionId)
"""Requests that a writer needs to find its collection."""


def _with_subclasses(classes: tuple[type[Request], ...]) -> set[type[Request]]:
    """Add all subclasses: a quiet request is a subclass of its ordinary form, and needs the same right."""
    found = set(classes)
    for cls in classes:
        found |= _with_subclasses(tuple(cls.__subclasses__()))
    return found


DCP_MESSAGES: tuple[type[Request], ...] = (dcp_stream_messages.Open, *TO_A_PRODUCER, *TO_A_CONSUMER, *TO_BOTH)

NEEDED: dict[type[Request], Action] = {
    **dict.fromkeys(_with_subclasses(_READS), Action.READ),
    **dict.fromkeys(DCP_MESSAGES, Action.STREAM),
    **dict.fromkeys(_with_subclasses(_WRITES), Action.WRITE),
    **dict.fromkeys(_with_subclasses(_ADMINISTERS), Action.ADMIN),
    **dict.fromkeys(_IS_A_NODE, Action.NODE),
    session.SetClusterConfig: Action.SECURITY,
    **dict.fromkeys(_with_subclasses(_USES), Action.USE),
}
"""The right that each message needs. A message that is neither here nor in `NEEDS_NO_LOGIN` is always refused."""

LARGE_REQUESTS: frozenset[type[Request]] = frozenset(
    {
        *(message for message, action in NEEDED.items() if action is Action.WRITE),
        session.SetClusterConfig,
        vbucket_messages.SetCollectionsManifest,
        vbucket_messages.Observe,
        *TO_A_CONSUMER,
    }
)
"""Requests that may have a long value: documents, configs, and a list (`Observe`) that has its own limit."""

READS_AS_WELL: frozenset[type[Request]] = frozenset(
    _with_subclasses(
        (
            documents.Increment,
            documents.GetAndTouch,
            documents.GetAndTouchQuiet,
            documents.GetLocked,
            *_SUBDOC_WRITES,
            subdocs.MultiMutation,
        )
    )
)
"""Writes whose answers show contents of a document: they also need the right to read."""

SERVED_WHILE_WAITING: frozenset[type[Request]] = frozenset(
    {
        session.SetClusterConfig,
        session.Stat,
        vbucket_messages.GetVBucket,
        vbucket_messages.GetCollectionsManifest,
        vbucket_messages.SetCollectionsManifest,
    }
)
"""Requests between the nodes of a cluster, none of them about documents. Those that need no log-in are served, too."""


Handler = Callable[[Any, Any], Response | Sequence[Response] | None]

_SERVED: dict[Handler, tuple[type[Request], ...]] = {
    connection.hello: (session.Hello,),
    connection.sasl_list: (session.SaslListMechanisms,),
    connection.sasl_auth: (session.SaslAuth,),
    connection.sasl_step: (session.SaslStep,),
    connection.select_bucket: (session.SelectBucket,),
    connection.get_cluster_config: (session.GetClusterConfig,),
    connection.set_cluster_config: (session.SetClusterConfig,),
    connection.get_error_map: (session.GetErrorMap,),
    connection.noop: (session.Noop, session.Verbosity),
    connection.version: (session.Version,),
    connection.quit_connection: (session.Quit, session.QuitQuiet),
    statistics.stat: (session.Stat,),
    # Documents.
    document.get: (documents.Get, documents.GetQuiet),
    document.get_with_key: (documents.GetWithKey, documents.GetWithKeyQuiet),
    document.get_replica: (documents.GetReplica,),
    document.get_ex: (documents.GetEx, documents.GetExReplica),
    document.get_meta: (documents.GetMeta, documents.GetMetaQuiet),
    document.set_document: (documents.Set, documents.SetQuiet),
    document.add: (documents.Add, documents.AddQuiet),
    document.replace: (documents.Replace, documents.ReplaceQuiet),
    document.delete: (documents.Delete, documents.DeleteQuiet),
    document.append: (documents.Append, documents.AppendQuiet),
    document.prepend: (documents.Prepend, documents.PrependQuiet),
    document.touch: (documents.Touch,),
    document.get_and_touch: (documents.GetAndTouch, documents.GetAndTouchQuiet),
    document.increment: (documents.Increment, documents.IncrementQuiet),
    document.decrement: (documents.Decrement, documents.DecrementQuiet),
    document.get_locked: (documents.GetLocked,),
    document.unlock: (documents.Unlock,),
    document.set_with_meta: (documents.SetWithMeta, documents.SetWithMetaQuiet),
    document.add_with_meta: (documents.AddWithMeta, documents.AddWithMetaQuiet),
    document.delete_with_meta: (documents.DeleteWithMeta, documents.DeleteWithMetaQuiet),
    range_scan.get_random_key: (documents.GetRandomKey,),
    range_scan.create: (documents.RangeScanCreate,),
    range_scan.continue_scan: (documents.RangeScanContinue,),
    range_scan.cancel: (documents.RangeScanCancel,),
    # Parts of documents.
    document.look_up_one: (subdocs.SubdocGet, subdocs.SubdocExists, subdocs.SubdocGetCount),
    document.mutate_one: _SUBDOC_WRITES,
    document.look_up: (subdocs.MultiLookup,),
    document.mutate: (subdocs.MultiMutation,),
    # Vbuckets and collections.
    vbuckets.set_vbucket: (vbucket_messages.SetVBucket,),
    vbuckets.get_vbucket: (vbucket_messages.GetVBucket,),
    vbuckets.delete_vbucket: (vbucket_messages.DeleteVBucket,),
    vbuckets.get_all_vb_seqnos: (vbucket_messages.GetAllVbSeqnos,),
    vbuckets.seqno_persistence: (vbucket_messages.SeqnoPersistence,),
    vbuckets.flush: (session.Flush, session.FlushQuiet),
    document.observe_seqno: (vbucket_messages.ObserveSeqno,),
    document.observe: (vbucket_messages.Observe,),
    vbuckets.get_manifest: (vbucket_messages.GetCollectionsManifest,),
    vbuckets.set_manifest: (vbucket_messages.SetCollectionsManifest,),
    vbuckets.get_collection_id: (vbucket_messages.GetCollectionId,),
    vbuckets.get_scope_id: (vbucket_messages.GetScopeId,),
    # DCP.
    dcp.get_failover_log: (dcp_stream_messages.GetFailoverLogByKv,),
    dcp.dcp: DCP_MESSAGES,
}

HANDLERS: dict[type[Request], Handler] = {
    message: handler for handler, messages in _SERVED.items() for message in messages
}
