"""Which message needs which right. What is not named needs to read."""

from __future__ import annotations

from headwater.node.auth.users import Action
from headwater.protocol.messages import dcp_streams, documents, session, subdocument, vbuckets, with_meta
from headwater.protocol.messages.base import Request
from headwater.protocol.states import TO_A_CONSUMER, TO_A_PRODUCER, TO_BOTH

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
"""The last two check for themselves: the one names the bucket it is about, the other may be about none."""

_WRITES = (
    documents.Set,
    documents.Delete,
    documents.Increment,
    documents.Append,
    documents.Touch,
    documents.GetLocked,
    documents.Unlock,
    subdocument.SubdocDictAdd,
    subdocument.SubdocDictUpsert,
    subdocument.SubdocDelete,
    subdocument.SubdocReplace,
    subdocument.SubdocArrayPushLast,
    subdocument.SubdocArrayPushFirst,
    subdocument.SubdocArrayInsert,
    subdocument.SubdocArrayAddUnique,
    subdocument.SubdocCounter,
    subdocument.MultiMutation,
    with_meta.SetWithMeta,
)
_ADMINISTERS = (
    session.Flush,
    session.Verbosity,
    vbuckets.SetVBucket,
    vbuckets.DeleteVBucket,
    vbuckets.SetCollectionsManifest,
)


_USES = (vbuckets.GetCollectionsManifest, vbuckets.GetCollectionId)
"""What a writer needs to find its collection."""


def _with_subclasses(classes: tuple[type[Request], ...]) -> set[type[Request]]:
    """A quiet request is a subclass of the one it is the quiet form of, and needs the same right."""
    found = set(classes)
    for cls in classes:
        found |= _with_subclasses(tuple(cls.__subclasses__()))
    return found


DCP_MESSAGES: tuple[type[Request], ...] = (dcp_streams.Open, *TO_A_PRODUCER, *TO_A_CONSUMER, *TO_BOTH)

NEEDED: dict[type[Request], Action] = {
    **dict.fromkeys(DCP_MESSAGES, Action.STREAM),
    **dict.fromkeys(_with_subclasses(_WRITES), Action.WRITE),
    **dict.fromkeys(_with_subclasses(_ADMINISTERS), Action.ADMIN),
    session.SetClusterConfig: Action.SECURITY,
    **dict.fromkeys(_with_subclasses(_USES), Action.USE),
}

READS_AS_WELL: frozenset[type[Request]] = frozenset(
    _with_subclasses(
        (
            documents.Increment,
            documents.GetAndTouch,
            documents.GetAndTouchQuiet,
            documents.GetLocked,
            *(write for write in _WRITES if write.__module__ == subdocument.__name__),
        )
    )
)
"""Writes whose answers show what is in a document: they need the right to read as well."""

SERVED_WHILE_WAITING: frozenset[type[Request]] = frozenset(
    {
        session.SetClusterConfig,
        session.Stat,
        vbuckets.GetVBucket,
        vbuckets.GetCollectionsManifest,
        vbuckets.SetCollectionsManifest,
    }
)
"""What the nodes of a cluster ask each other, and nothing about documents, beside what needs no log-in."""
