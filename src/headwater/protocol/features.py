"""The names of the protocol's numbers: features that HELLO negotiates, magics and opcodes.

`Negotiated` is what the codec must know of the features. (kv_engine, docs/BinaryProtocol.md, "Defined Values" and
"0x1f HELO".) Statuses, which have more than a name, are in `status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Self


class OpenIntEnum(IntEnum):
    """An enumeration that keeps unknown numbers.

    Servers get new opcodes, statuses and reasons; a client that fails on them breaks with the next release.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or value < 0:
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_0x{value:02x}"
        member._value_ = value
        return member

    @property
    def is_known(self) -> bool:
        return self._name_ in type(self).__members__


class OpenIntFlag(IntFlag):
    """Flags that keep unknown bits, without remembering every combination that a peer has sent.

    The standard library keeps each value that it has seen for ever, and a peer can send 2**32 of them.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self:
        flags: Self = super()._missing_(value)
        known_bits = sum(int(flag) for flag in cls)
        if flags.value & ~known_bits:
            cls._value2member_map_.pop(flags.value, None)
        return flags


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
    SNAPPY_EVERYWHERE = 0x13
    """Any response may be compressed, such as a cluster config."""
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
    SUBDOC_MULTIPLE_XATTR_KEYS = 0x20
    SUBDOC_BINARY_XATTR = 0x21
    RANGE_SCAN_INCLUDE_XATTR = 0x22
    SUBDOC_REPLICA_READ_OF_DELETED = 0x23
    GET_RANDOM_KEY_INCLUDE_XATTR = 0x24
    MUTATE_WITH_META = 0x25


FEATURE_NEEDS: dict[Feature, frozenset[Feature]] = {
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION: frozenset({Feature.DUPLEX}),
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF: frozenset({Feature.DUPLEX}),
    Feature.VATTR: frozenset({Feature.XATTR}),
    Feature.SUBDOC_DOCUMENT_MACROS: frozenset({Feature.XATTR}),
    Feature.RANGE_SCAN_INCLUDE_XATTR: frozenset({Feature.XATTR}),
    Feature.GET_RANDOM_KEY_INCLUDE_XATTR: frozenset({Feature.XATTR, Feature.JSON, Feature.SNAPPY_EVERYWHERE}),
}
"""A HELLO that asks for one without the others is EINVAL (recorded of 8.0.2; 0x15 and 0x18: kv_engine, `feature.h`)."""


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The features that both ends agreed on. A message decodes from bytes plus this, never from a connection."""

    features: frozenset[Feature] = frozenset()

    @property
    def collections(self) -> bool:
        """Whether document keys start with their collection id."""
        return Feature.COLLECTIONS in self.features


NOTHING_NEGOTIATED = Negotiated()
WITH_COLLECTIONS = Negotiated(frozenset({Feature.COLLECTIONS}))


# --- magics and opcodes: bytes 0 and 1 of every frame -----------------------------------------------------------------


class Magic(IntEnum):
    """Whether a frame is a request or a response, who started it, and its framing."""

    REQUEST = 0x80
    RESPONSE = 0x81
    FLEXIBLE_REQUEST = 0x08
    FLEXIBLE_RESPONSE = 0x18
    SERVER_REQUEST = 0x82
    SERVER_RESPONSE = 0x83

    @property
    def is_request(self) -> bool:
        return self in _REQUESTS

    @property
    def is_flexible(self) -> bool:
        """Whether byte 2 is the length of framing extras and byte 3 the key length, instead of a 16-bit key length."""
        return self in _FLEXIBLE


_REQUESTS = frozenset({Magic.REQUEST, Magic.FLEXIBLE_REQUEST, Magic.SERVER_REQUEST})
_FLEXIBLE = frozenset({Magic.FLEXIBLE_REQUEST, Magic.FLEXIBLE_RESPONSE})


class Opcode(OpenIntEnum):
    """Client opcodes. Those that Headwater has no message for are listed so that a capture can name them."""

    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    QUIT = 0x07
    FLUSH = 0x08
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    APPEND = 0x0E
    PREPEND = 0x0F
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    QUITQ = 0x17
    FLUSHQ = 0x18
    APPENDQ = 0x19
    PREPENDQ = 0x1A
    VERBOSITY = 0x1B
    TOUCH = 0x1C
    GAT = 0x1D
    GATQ = 0x1E
    HELLO = 0x1F
    SASL_LIST_MECHS = 0x20
    SASL_AUTH = 0x21
    SASL_STEP = 0x22
    IOCTL_GET = 0x23
    IOCTL_SET = 0x24
    SET_VBUCKET = 0x3D
    GET_VBUCKET = 0x3E
    DEL_VBUCKET = 0x3F
    GET_ALL_VB_SEQNOS = 0x48
    GET_EX = 0x49
    GET_EX_REPLICA = 0x4A
    MUTATE_WITH_META = 0x4B
    DCP_OPEN = 0x50
    DCP_ADD_STREAM = 0x51
    DCP_CLOSE_STREAM = 0x52
    DCP_STREAM_REQUEST = 0x53
    DCP_GET_FAILOVER_LOG = 0x54
    DCP_STREAM_END = 0x55
    DCP_SNAPSHOT_MARKER = 0x56
    DCP_MUTATION = 0x57
    DCP_DELETION = 0x58
    DCP_EXPIRATION = 0x59
    DCP_FLUSH = 0x5A
    DCP_SET_VBUCKET_STATE = 0x5B
    DCP_NOOP = 0x5C
    DCP_BUFFER_ACK = 0x5D
    DCP_CONTROL = 0x5E
    DCP_SYSTEM_EVENT = 0x5F
    DCP_PREPARE = 0x60
    DCP_SEQNO_ACKNOWLEDGED = 0x61
    DCP_COMMIT = 0x62
    DCP_ABORT = 0x63
    DCP_SEQNO_ADVANCED = 0x64
    DCP_OSO_SNAPSHOT = 0x65
    DCP_CACHE_TRANSFER = 0x66
    DCP_CACHE_TRANSFER_END = 0x67
    GET_FUSION_STORAGE_SNAPSHOT = 0x70
    RELEASE_FUSION_STORAGE_SNAPSHOT = 0x71
    MOUNT_FUSION_VBUCKET = 0x72
    UNMOUNT_FUSION_VBUCKET = 0x73
    SYNC_FUSION_LOGSTORE = 0x74
    START_FUSION_UPLOADER = 0x75
    STOP_FUSION_UPLOADER = 0x76
    DELETE_FUSION_NAMESPACE = 0x77
    GET_FUSION_NAMESPACES = 0x78
    STOP_PERSISTENCE = 0x80
    START_PERSISTENCE = 0x81
    SET_PARAM = 0x82
    GET_REPLICA = 0x83
    SET_CHRONICLE_AUTH_TOKEN = 0x84
    CREATE_BUCKET = 0x85
    DELETE_BUCKET = 0x86
    LIST_BUCKETS = 0x87
    SELECT_BUCKET = 0x89
    PAUSE_BUCKET = 0x8A
    RESUME_BUCKET = 0x8B
    VALIDATE_BUCKET_CONFIG = 0x8C
    OBSERVE_SEQNO = 0x91
    OBSERVE = 0x92
    GET_LOCKED = 0x94
    UNLOCK_KEY = 0x95
    GET_FAILOVER_LOG = 0x96
    GET_META = 0xA0
    GETQ_META = 0xA1
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    ADD_WITH_META = 0xA4
    ADDQ_WITH_META = 0xA5
    DEL_WITH_META = 0xA8
    DELQ_WITH_META = 0xA9
    COMPACT_DB = 0xB3
    SET_CLUSTER_CONFIG = 0xB4
    GET_CLUSTER_CONFIG = 0xB5
    GET_RANDOM_KEY = 0xB6
    SEQNO_PERSISTENCE = 0xB7
    GET_KEYS = 0xB8
    COLLECTIONS_SET_MANIFEST = 0xB9
    COLLECTIONS_GET_MANIFEST = 0xBA
    COLLECTIONS_GET_ID = 0xBB
    COLLECTIONS_GET_SCOPE_ID = 0xBC
    SUBDOC_GET = 0xC5
    SUBDOC_EXISTS = 0xC6
    SUBDOC_DICT_ADD = 0xC7
    SUBDOC_DICT_UPSERT = 0xC8
    SUBDOC_DELETE = 0xC9
    SUBDOC_REPLACE = 0xCA
    SUBDOC_ARRAY_PUSH_LAST = 0xCB
    SUBDOC_ARRAY_PUSH_FIRST = 0xCC
    SUBDOC_ARRAY_INSERT = 0xCD
    SUBDOC_ARRAY_ADD_UNIQUE = 0xCE
    SUBDOC_COUNTER = 0xCF
    SUBDOC_MULTI_LOOKUP = 0xD0
    SUBDOC_MULTI_MUTATION = 0xD1
    SUBDOC_GET_COUNT = 0xD2
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0xD3
    RANGE_SCAN_CREATE = 0xDA
    RANGE_SCAN_CONTINUE = 0xDB
    RANGE_SCAN_CANCEL = 0xDC
    PREPARE_SNAPSHOT = 0xE0
    RELEASE_SNAPSHOT = 0xE1
    DOWNLOAD_SNAPSHOT = 0xE2
    GET_FILE_FRAGMENT = 0xE3
    GET_ERROR_MAP = 0xFE


class ServerOpcode(OpenIntEnum):
    """Opcodes of frames that a server starts by itself (magic 0x82)."""

    CLUSTERMAP_CHANGE_NOTIFICATION = 0x01
    AUTHENTICATE = 0x02
    ACTIVE_EXTERNAL_USERS = 0x03
    GET_AUTHORIZATION = 0x04


class VBucketState(OpenIntEnum):
    ACTIVE = 1
    REPLICA = 2
    PENDING = 3
    DEAD = 4
