"""Frames for fuzzing a node: valid requests of every class that it serves, and mutations of them.

Random bytes seldom get past the first check of a request. So a corpus starts with valid requests, about documents,
collections and vbuckets that may exist, and changes some of them in ways that keep the following frames readable:
parts are cut, doubled and moved between extras, key and value, numbers become extreme, frame infos are added.
`block` then joins many of them, in any order, and changes single bytes. Frames that make the rest of a connection
unreadable, or end its login, are in `endings` and sent last.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from headwater.protocol.features import Feature, Magic, Opcode
from headwater.protocol.frames import FrameInfo, RequestInfo, durability, encode_frame_infos, preserve_ttl, stream_id
from headwater.protocol.messages import dcp_changes, dcp_streams, session, subdocument, vbuckets
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.documents import RangeScanCreate, SetWithMeta
from headwater.protocol.states import TO_A_CONSUMER
from headwater.protocol.values import Datatype

VBUCKETS = 16
HEADER_BYTES = 24
MADE_BY_CLASS = 30
"""Valid requests of each class."""
MUTATED_SHARE = 0.35
FLIPPED_SHARE = 0.4
RARE_SHARE = 0.02

FEATURES = (
    Feature.XERROR, Feature.SELECT_BUCKET, Feature.XATTR, Feature.JSON, Feature.SNAPPY, Feature.MUTATION_SEQNO,
    Feature.ALT_REQUEST, Feature.SYNC_REPLICATION, Feature.PRESERVE_TTL, Feature.COLLECTIONS,
)  # fmt: skip

ENDINGS: frozenset[type[Request]] = frozenset({session.Quit, session.QuitQuiet, session.SaslAuth, session.SaslStep})
"""Requests after which a connection has no user any more, or is closed."""
RARE: frozenset[type[Request]] = frozenset(
    {
        session.SelectBucket, session.Flush, session.FlushQuiet, session.Stat, session.Hello, dcp_streams.Open,
        vbuckets.DeleteVBucket, vbuckets.SetCollectionsManifest, *TO_A_CONSUMER,
    }
)  # fmt: skip
"""Requests that destroy what others need, have long answers, or are refused because of their kind."""

_VALUES = (
    b"", b"1", b"41", b"{}", b"[1,2,3]", b'"text"', b'{"a":1,"b":[1,2,{"c":null}],"n":7,"list":[]}', b"\xff\0binary",
    b'{"a":' * 40 + b"1" + b"}" * 40, b"[" * 200, b'{"a":1,"a":2}', b"x" * 3000, b'{"n":99999999999999999999}',
    b"\0\0\0\x10\0\0\0\x0c_sync\0{\"u\":1}\0\0{}",
)  # fmt: skip
_PATHS = (
    b"a", b"b", b"b[0]", b"b[2].c", b"n", b"list", b"list[-1]", b"x.y.z", b"", b"a..b", b"`q`.r", b"[", b"$document",
)  # fmt: skip
_NUMBERS = (
    0, 0, 0, 0, 0, 1, 1, 2, 3, 5, 13, 100, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_INFOS = (
    (durability(1),), (durability(2, timeout_ms=50),), (durability(3),), (preserve_ttl(),), (stream_id(1),),
    (FrameInfo(RequestInfo.BARRIER),), (FrameInfo(14, b"abc"),), (FrameInfo(200, bytes(40)),),
)  # fmt: skip
_MUTATION_OPCODES = (Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_DELETE, Opcode.SUBDOC_COUNTER, Opcode.SET, Opcode.DELETE)
_LOOKUPS = (subdocument.SubdocGet, subdocument.SubdocExists, subdocument.SubdocGetCount)
_LOOKUP_OPCODES = (Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT, Opcode.GET)
_STREAM_FILTERS = (
    {"uid": "0"},
    {"collections": ["0", "8"]},
    {"scope": "8"},
    {"sid": 1, "collections": ["0"]},
    {"purge_seqno": "1"},
)
_CONTROLS = {
    b"enable_noop": b"true", b"set_noop_interval": b"1", b"connection_buffer_size": b"1000000",
    b"set_priority": b"high", b"enable_stream_id": b"true", b"enable_expiry_opcode": b"true",
    b"enable_sync_writes": b"true",
    b"consumer_name": b"fuzz", b"force_value_compression": b"true", b"max_marker_version": b"2.2",
    b"change_streams": b"true", b"enable_out_of_order_snapshots": b"true", b"no_such_control": b"1",
}  # fmt: skip
MANIFEST = {
    "uid": "2",
    "scopes": [
        {"uid": "0", "name": "_default", "collections": [{"uid": "0", "name": "_default"}, {"uid": "8", "name": "c"}]},
        {"uid": "8", "name": "s", "collections": [{"uid": "9", "name": "d", "maxTTL": 100}]},
    ],
}
_SCAN = {"collection": "0", "range": {"start": "", "end": "/w=="}, "key_only": True}
_SAMPLING = {"collection": "0", "sampling": {"samples": 5, "seed": 1}}


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _spec(rng: random.Random, kind: Any, opcodes: tuple[Opcode, ...]) -> Any:
    value = {"value": rng.choice(_VALUES)} if kind is subdocument.MutationSpec else {}
    flags = subdocument.PathFlags(rng.choice((0, 0, 1, 4, 5)))
    return kind(opcode=rng.choice(opcodes), flags=flags, path=rng.choice(_PATHS), **value)


def _specs(rng: random.Random, kind: Any, opcodes: tuple[Opcode, ...]) -> tuple[Any, ...]:
    return tuple(_spec(rng, kind, opcodes) for _ in range(rng.randrange(1, 5)))


def _json(*values: Any) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: {"value": _text(rng.choice(values)), "datatype": Datatype.JSON}


def _keys(*keys: bytes) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: {"key": rng.choice(keys)}


_PARTS: dict[type[Request], Callable[[random.Random], dict[str, Any]]] = {
    session.Hello: lambda rng: {"features": (*FEATURES, *map(Feature, rng.sample(range(40), rng.randrange(3))))},
    session.SaslAuth: lambda rng: {
        "key": rng.choice((b"PLAIN", b"SCRAM-SHA512", b"SCRAM-SHA1", b"NONE")),
        "value": rng.choice((b"\0made up\0guess", b"n,,n=made up,r=abc", b"")),
    },
    session.SaslStep: lambda rng: {"key": b"SCRAM-SHA512", "value": rng.choice((b"c=biws,r=abc,p=AAAA", b"x"))},
    session.SelectBucket: _keys(b"fuzzed", b"fuzzed", b"none", b"\0"),
    # No config that names a node: the node would connect to it.
    session.SetClusterConfig: lambda rng: {"key": b"fuzzed", "value": rng.choice((b"{}", b'{"rev":1}', b"[]", b"{"))},
    session.GetErrorMap: lambda rng: {"version": rng.randrange(4)},
    session.Stat: _keys(
        b"", b"vbucket", b"vbucket 3", b"vbucket-details", b"dcp", b"key k1 1", b"key a b", b"reset", b"collections",
        b"failovers", b"vbucket " + b"9" * 5000, b"key a " + b"9" * 5000, b"durability-monitor", b"none",
    ),
    RangeScanCreate: _json(
        _SCAN, _SCAN, _SAMPLING, {**_SCAN, "collection": "8"}, {"range": 1}, [], {**_SCAN, "snapshot_requirements": {}}
    ),
    subdocument.MultiLookup: lambda rng: {"specs": _specs(rng, subdocument.LookupSpec, _LOOKUP_OPCODES)},
    subdocument.MultiMutation: lambda rng: {"specs": _specs(rng, subdocument.MutationSpec, _MUTATION_OPCODES)},
    SetWithMeta: lambda rng: {
        "value": rng.choice(_VALUES),
        "meta_cas": rng.choice((1, 2**60, rng.getrandbits(64))),
        "extended_meta": rng.choice((None, None, b"\x01\x01\0\x01\x01")),
    },
    vbuckets.SetVBucket: lambda rng: {
        "state": dcp_streams.VBucketState(rng.choice((1, 1, 1, 1, 2, 3, 4, 9))),
        "value": rng.choice((b"", b"", b'{"next_expected_state":"replica"}', b"[]")),
    },
    vbuckets.ObserveSeqno: lambda rng: {"vbuuid": rng.getrandbits(64)},
    vbuckets.Observe: lambda rng: {
        "keys": tuple(vbuckets.ObservedKey(vbucket=vb, key=b"\0k%d" % vb) for vb in range(rng.randrange(1, 9)))
    },
    vbuckets.SetCollectionsManifest: _json(MANIFEST, MANIFEST, {**MANIFEST, "uid": "1"}, {"uid": "3", "scopes": 1}, {}),
    vbuckets.GetCollectionId: _keys(b"_default._default", b"s.d", b".c", b"a.a.a", b"s"),
    vbuckets.GetScopeId: _keys(b"_default", b"s", b"none", b"a.b.c"),
    dcp_streams.Open: lambda rng: {
        "key": b"fuzz-%d" % rng.randrange(8), "flags": dcp_streams.OpenFlags(rng.choice((1, 1, 5, 0x25, 2, 0x48))),
    },
    dcp_streams.Control: lambda rng: dict(zip(("key", "value"), rng.choice(list(_CONTROLS.items())), strict=True)),
    dcp_streams.StreamRequest: lambda rng: {
        "value": b"" if rng.random() < 0.7 else _text(rng.choice(_STREAM_FILTERS)),
        "start_seqno": rng.choice((0, 0, 1, 50)), "vbuuid": rng.choice((0, rng.getrandbits(64))),
        "end_seqno": rng.choice((2**64 - 1, 100, 0)),
        "flags": dcp_streams.StreamFlags(rng.choice((0, 0, 0, 2, 4, 8, 0x40, 0x100))),
    },
    dcp_changes.CacheTransfer: lambda rng: {
        "items": (dcp_changes.CacheItem(seqno=rng.randrange(9), collection_id=0, key=b"k1", value=b"{}"),)
    },
}  # fmt: skip
"""The parts of a class that the names and layouts of its fields do not determine."""


def valid_request(cls: type[Request], rng: random.Random) -> Request:
    """Return a request that may succeed, if a user with the privilege sends it at the right moment."""
    number = rng.randrange(4 * VBUCKETS)
    by_name: dict[str, Callable[[], Any]] = {
        "opaque": lambda: rng.getrandbits(32),
        "vbucket": lambda: number % VBUCKETS,
        "cas": lambda: 0 if rng.random() < 0.9 else rng.getrandbits(64),
        "datatype": lambda: Datatype.RAW if rng.random() < 0.9 else Datatype(rng.randrange(8)),
        "frame_infos": lambda: () if rng.random() < 0.9 else rng.choice(_INFOS),
        "collection_id": lambda: rng.choice((0, 0, 0, 0, 8, 9, 10)),
        "key": lambda: b"k%d" % number,
        "value": lambda: rng.choice(_VALUES),
        "new_value": lambda: rng.choice(_VALUES[:8]),
        "path": lambda: rng.choice(_PATHS),
        "expiry": lambda: rng.choice((0, 0, 0, 1, 100, 2**32 - 1)),
        "flags": lambda: rng.choice((0, 0, 0, 0, 0, 1, 4, 5, 255)),
        "doc_flags": lambda: rng.choice((0, 0, 0, 1, 2, 4, 8)),
        "options": lambda: rng.choice((0, 0, 1, 2, 4, 8)),
    }
    if cls in _LOOKUPS and rng.random() < 0.9:
        by_name["new_value"] = lambda: b""
    layout = rng.choice(cls.layouts)
    numbers = {
        field.name: rng.choice(_NUMBERS) % 256**field.width_bytes
        if field.code in "BHIQ"
        else rng.randbytes(field.width_bytes)
        for field in layout.fields
    }
    in_extras = {name for known in cls.layouts for name in known.names}
    parts: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in numbers and field.name not in by_name:
            parts[field.name] = numbers[field.name]
        elif field.name in by_name and (field.name in numbers or field.name not in in_extras):
            parts[field.name] = by_name[field.name]()
        elif field.default is MISSING:
            parts[field.name] = 0
    for base in cls.__mro__:
        if base in _PARTS:
            parts |= _PARTS[base](rng)
            break
    if len(parts.get("key", b"")) > 255:
        parts["frame_infos"] = ()  # Flexible framing has one byte for the key's length.
    return cls(**parts)


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """Return the request with another body or header, and matching lengths, so that the next frame stays readable."""
    magic, opcode, key_bytes, extras_bytes = frame[0], frame[1], int.from_bytes(frame[2:4]), frame[4]
    infos = b""
    if magic == Magic.FLEXIBLE_REQUEST:
        infos, key_bytes = frame[HEADER_BYTES : HEADER_BYTES + frame[2]], frame[3]
    body = frame[HEADER_BYTES + len(infos) :]
    head = bytearray(frame[5:8] + frame[12:HEADER_BYTES])
    match rng.randrange(8):
        case 0:
            body = body[: rng.randrange(len(body) + 1)]
        case 1:
            body += rng.randbytes(rng.choice((1, 4, 8, 300)))
        case 2:
            at = rng.randrange(len(body) + 1)
            body = body[:at] + rng.randbytes(rng.randrange(1, 9)) + body[at:]
        case 3:
            extras_bytes = rng.choice((0, extras_bytes + 1, max(extras_bytes - 1, 0), 255))
        case 4:
            key_bytes = rng.choice((0, key_bytes + 1, 250, 251, len(body)))
        case 5:
            infos = encode_frame_infos(rng.choice(_INFOS)) + (rng.randbytes(3) if rng.random() < 0.3 else b"")
        case 6:
            head[rng.randrange(len(head))] = rng.choice((0, 1, 127, 128, 255))
        case 7:
            body *= 2
    extras_bytes = min(extras_bytes, len(body), 255)
    key_bytes = min(key_bytes, len(body) - extras_bytes, 255 if infos else 65535)
    lengths = bytes([len(infos), key_bytes]) if infos else key_bytes.to_bytes(2)
    magic = Magic.FLEXIBLE_REQUEST if infos else Magic.REQUEST
    total = (len(infos) + len(body)).to_bytes(4)
    return bytes([magic, opcode]) + lengths + bytes([extras_bytes]) + head[:3] + total + head[3:] + infos + body


class FrameCorpus:
    """Many frames of some classes, from which blocks are made."""

    def __init__(self, classes: Iterable[type[Request]], seed: int) -> None:
        rng = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        classes = list(classes)
        each = [cls for cls in classes if cls not in ENDINGS] * 3
        self.some_of_each = b"".join(valid_request(cls, rng).encode() for cls in each)
        self.endings = [valid_request(cls, rng).encode() for cls in classes if cls in ENDINGS]
        # These make the rest of the connection unreadable: no magic, a body beyond the limit, a key beyond the body.
        self.endings += [
            bytes(24),
            b"\x80\0\0\0\0\0\0\0\xff\xff\xff\xff" + bytes(12),
            b"\x80\0\xff\xff" + bytes(20),
            b"\x80",
        ]
        self._frames: list[bytes] = []
        shares: list[float] = []
        for cls in classes:
            if cls in ENDINGS:
                continue
            for _ in range(MADE_BY_CLASS):
                frame = valid_request(cls, rng).encode()
                self._frames.append(mutated(frame, rng) if rng.random() < MUTATED_SHARE else frame)
                shares.append(RARE_SHARE if cls in RARE else 1.0)
        self._shares = np.cumsum(shares) / np.sum(shares)
        self._sizes = np.array([len(frame) for frame in self._frames])

    def block(self, count: int) -> bytes:
        """Return this many frames, some of which have one more byte changed."""
        rng, frames = self._rng, self._frames
        chosen = np.searchsorted(self._shares, rng.random(count))
        data = np.frombuffer(b"".join([frames[at] for at in chosen.tolist()]), dtype=np.uint8).copy()
        sizes = self._sizes[chosen]
        starts = np.cumsum(sizes) - sizes
        flipped = rng.random(count) < FLIPPED_SHARE
        starts, bodies = starts[flipped], sizes[flipped] - HEADER_BYTES
        in_header = (bodies == 0) | (rng.random(len(starts)) < 0.3)
        # Never a magic or a length, which are needed to find the next frame.
        header_at = rng.choice(np.array([1, 5, 6, 7, *range(12, 24)]), len(starts))
        at = starts + np.where(in_header, header_at, HEADER_BYTES + (rng.random(len(starts)) * bodies).astype(np.int64))
        data[at] = rng.choice(np.array([0, 1, 0x22, 0x7F, 0x80, 0xFF, *range(256)], dtype=np.uint8), len(at))
        return data.tobytes()
