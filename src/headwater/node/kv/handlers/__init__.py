"""One function a message. `HANDLERS` is the table of what the node serves on a key-value connection.

`kv.session` looks a request up here after it has checked the rights (`kv.permissions`). To serve another message, write
a function with a context and the request, and enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater.node.kv.handlers import (
    collections,
    connection,
    dcp,
    range_scan,
    statistics,
    subdocument,
    vbuckets,
    with_meta,
)
from headwater.node.kv.handlers import documents as document
from headwater.node.kv.permissions import DCP_MESSAGES
from headwater.protocol.messages import dcp_streams as dcp_stream_messages
from headwater.protocol.messages import documents, session
from headwater.protocol.messages import range_scan as range_scan_messages
from headwater.protocol.messages import subdocument as subdocument_messages
from headwater.protocol.messages import vbuckets as vbucket_messages
from headwater.protocol.messages import with_meta as with_meta_messages
from headwater.protocol.messages.base import Request, Response

Handler = Callable[[Any, Any], Response | Sequence[Response] | None]

_CONNECTION: dict[type[Request], Handler] = {
    session.Hello: connection.hello,
    session.SaslListMechanisms: connection.sasl_list,
    session.SaslAuth: connection.sasl_auth,
    session.SaslStep: connection.sasl_step,
    session.SelectBucket: connection.select_bucket,
    session.GetClusterConfig: connection.get_cluster_config,
    session.SetClusterConfig: connection.set_cluster_config,
    session.GetErrorMap: connection.get_error_map,
    session.Noop: connection.noop,
    session.Version: connection.version,
    session.Verbosity: connection.verbosity,
    session.Quit: connection.quit_connection,
    session.QuitQuiet: connection.quit_connection,
    session.Stat: statistics.stat,
}

_DOCUMENTS: dict[type[Request], Handler] = {
    documents.Get: document.get,
    documents.GetQuiet: document.get,
    documents.GetWithKey: document.get_with_key,
    documents.GetWithKeyQuiet: document.get_with_key,
    documents.GetReplica: document.get_replica,
    documents.GetEx: document.get_ex,
    documents.GetExReplica: document.get_ex,
    documents.GetMeta: document.get_meta,
    documents.GetMetaQuiet: document.get_meta,
    documents.Set: document.set_document,
    documents.SetQuiet: document.set_document,
    documents.Add: document.add,
    documents.AddQuiet: document.add,
    documents.Replace: document.replace,
    documents.ReplaceQuiet: document.replace,
    documents.Delete: document.delete,
    documents.DeleteQuiet: document.delete,
    documents.Append: document.append,
    documents.AppendQuiet: document.append,
    documents.Prepend: document.prepend,
    documents.PrependQuiet: document.prepend,
    documents.Touch: document.touch,
    documents.GetAndTouch: document.get_and_touch,
    documents.GetAndTouchQuiet: document.get_and_touch,
    documents.Increment: document.increment,
    documents.IncrementQuiet: document.increment,
    documents.Decrement: document.decrement,
    documents.DecrementQuiet: document.decrement,
    documents.GetLocked: document.get_locked,
    documents.Unlock: document.unlock,
    documents.GetRandomKey: range_scan.get_random_key,
    range_scan_messages.RangeScanCreate: range_scan.create,
    range_scan_messages.RangeScanContinue: range_scan.continue_scan,
    range_scan_messages.RangeScanCancel: range_scan.cancel,
    with_meta_messages.SetWithMeta: with_meta.set_with_meta,
    with_meta_messages.SetWithMetaQuiet: with_meta.set_with_meta,
    with_meta_messages.AddWithMeta: with_meta.add_with_meta,
    with_meta_messages.AddWithMetaQuiet: with_meta.add_with_meta,
    with_meta_messages.DeleteWithMeta: with_meta.delete_with_meta,
    with_meta_messages.DeleteWithMetaQuiet: with_meta.delete_with_meta,
}

_SUBDOCUMENTS: dict[type[Request], Handler] = {
    subdocument_messages.SubdocGet: subdocument.look_up_one,
    subdocument_messages.SubdocExists: subdocument.look_up_one,
    subdocument_messages.SubdocGetCount: subdocument.look_up_one,
    subdocument_messages.SubdocDictAdd: subdocument.mutate_one,
    subdocument_messages.SubdocDictUpsert: subdocument.mutate_one,
    subdocument_messages.SubdocDelete: subdocument.mutate_one,
    subdocument_messages.SubdocReplace: subdocument.mutate_one,
    subdocument_messages.SubdocArrayPushLast: subdocument.mutate_one,
    subdocument_messages.SubdocArrayPushFirst: subdocument.mutate_one,
    subdocument_messages.SubdocArrayInsert: subdocument.mutate_one,
    subdocument_messages.SubdocArrayAddUnique: subdocument.mutate_one,
    subdocument_messages.SubdocCounter: subdocument.mutate_one,
    subdocument_messages.MultiLookup: subdocument.look_up,
    subdocument_messages.MultiMutation: subdocument.mutate,
}

_VBUCKETS: dict[type[Request], Handler] = {
    vbucket_messages.SetVBucket: vbuckets.set_vbucket,
    vbucket_messages.GetVBucket: vbuckets.get_vbucket,
    vbucket_messages.DeleteVBucket: vbuckets.delete_vbucket,
    dcp_stream_messages.GetFailoverLogByKv: dcp.get_failover_log,
    vbucket_messages.GetAllVbSeqnos: vbuckets.get_all_vb_seqnos,
    vbucket_messages.SeqnoPersistence: vbuckets.seqno_persistence,
    vbucket_messages.ObserveSeqno: document.observe_seqno,
    vbucket_messages.Observe: document.observe,
    session.Flush: vbuckets.flush,
    session.FlushQuiet: vbuckets.flush,
}

_COLLECTIONS: dict[type[Request], Handler] = {
    vbucket_messages.GetCollectionsManifest: collections.get_manifest,
    vbucket_messages.SetCollectionsManifest: collections.set_manifest,
    vbucket_messages.GetCollectionId: collections.get_collection_id,
    vbucket_messages.GetScopeId: collections.get_scope_id,
}

HANDLERS: dict[type[Request], Handler] = {
    **_CONNECTION,
    **_DOCUMENTS,
    **_SUBDOCUMENTS,
    **_VBUCKETS,
    **_COLLECTIONS,
    **dict.fromkeys(DCP_MESSAGES, dcp.dcp),
}
