"""What HELLO negotiates, and what of it the codec has to know."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.protocol.numbers import OpenIntEnum


class Feature(OpenIntEnum):
    TLS = 0x02
    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    TCP_DELAY = 0x05
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTERMAP_CHANGE_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    PRESERVE_TTL = 0x14
    VATTR = 0x15
    PITR = 0x16
    SUBDOC_CREATE_AS_DELETED = 0x17
    SUBDOC_DOCUMENT_MACROS = 0x18
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0x19
    REPORT_UNIT_USAGE = 0x1A
    NON_BLOCKING_THROTTLING = 0x1B
    SUBDOC_REPLICA_READ = 0x1C
    GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION = 0x1D
    DEDUPE_NMVB_CLUSTERMAP = 0x1E
    CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF = 0x1F


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The features both ends agreed on. A message decodes from bytes plus this, never from a connection."""

    features: frozenset[Feature] = frozenset()

    @property
    def collections(self) -> bool:
        """Document keys start with their collection id."""
        return Feature.COLLECTIONS in self.features


NOTHING_NEGOTIATED = Negotiated()
WITH_COLLECTIONS = Negotiated(frozenset({Feature.COLLECTIONS}))
