"""Durable writes over bare sockets, a diary of them, and the rules for it. It shares no code with the node.

A writer sends majority writes to one node and notes for each when it was sent and answered, and the branch (vbuuid)
and seqno of the answer. The notes of all writers show whether a vbucket ever had two active nodes: the writes that
one reign has acknowledged must all be over before those of the next begin, in time as well as in seqnos.

The protocol is that of kv_engine's docs/BinaryProtocol.md: a header of 24 bytes, frame info 1 for durability.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

_HEADER = struct.Struct(">BBHBBHIIQ")
_GET, _SET, _HELLO, _SASL_AUTH, _SASL_STEP, _SELECT = 0x00, 0x01, 0x1F, 0x21, 0x22, 0x89
_MUTATION_SEQNO, _XERROR, _ALT_REQUEST, _SYNC_REPLICATION = 0x04, 0x07, 0x10, 0x11
_SUCCESS, _NOT_MY_VBUCKET = 0, 7
_MAJORITY = 1
_DURABLE_MS = 1500
_REFUSED = {_NOT_MY_VBUCKET, 0x01, 0x24, 0x86, 0xA1, 0xA2}
"""Nothing was written: not active here, no access, temporary failure, durability impossible, write in progress."""


def vbucket_of(key: bytes, vbuckets: int) -> int:
    return (zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets


class BareConnection:
    """A connection that has logged in (SCRAM-SHA256, RFC 7677) and selected its bucket."""

    def __init__(self, sock: socket.socket, user: str, password: str, bucket: str) -> None:
        self._sock = sock
        features = struct.pack(">4H", _MUTATION_SEQNO, _XERROR, _ALT_REQUEST, _SYNC_REPLICATION)
        assert self.ask(_HELLO, key=b"diary", value=features)[0] == _SUCCESS
        nonce = base64.b64encode(os.urandom(18)).decode()
        first = f"n={user},r={nonce}"
        _, _, challenge = self.ask(_SASL_AUTH, key=b"SCRAM-SHA256", value=f"n,,{first}".encode())
        parts = dict(part.split("=", 1) for part in challenge.decode().split(","))
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(parts["s"]), int(parts["i"]))
        last = f"c=biws,r={parts['r']}"
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        signed = f"{first},{challenge.decode()},{last}".encode()
        signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
        assert self.ask(_SASL_STEP, key=b"SCRAM-SHA256", value=f"{last},p={proof}".encode())[0] == _SUCCESS
        assert self.ask(_SELECT, key=bucket.encode())[0] == _SUCCESS

    def ask(
        self, opcode: int, *, key: bytes, value: bytes = b"", vbucket: int = 0, extras: bytes = b"", infos: bytes = b""
    ) -> tuple[int, bytes, bytes]:
        """Return status, extras and value of the answer."""
        body = infos + extras + key + value
        magic, lengths = (0x08, len(infos) << 8 | len(key)) if infos else (0x80, len(key))
        self._sock.sendall(_HEADER.pack(magic, opcode, lengths, len(extras), 0, vbucket, len(body), 7, 0) + body)
        magic, _, lengths, extras_bytes, _, status, body_bytes, _, _ = _HEADER.unpack(self._take(_HEADER.size))
        body = self._take(body_bytes)
        infos_bytes, key_bytes = (lengths >> 8, lengths & 0xFF) if magic == 0x18 else (0, lengths)
        value_at = infos_bytes + extras_bytes + key_bytes
        return status, body[infos_bytes : infos_bytes + extras_bytes], body[value_at:]

    def _take(self, count: int) -> bytes:
        taken = b""
        while len(taken) < count:
            data = self._sock.recv(count - len(taken))
            if not data:
                raise ConnectionError("the node has closed the connection")
            taken += data
        return taken

    def get(self, key: bytes, vbucket: int) -> tuple[int, bytes]:
        status, _, value = self.ask(_GET, key=key, vbucket=vbucket)
        return status, value

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True, slots=True)
class Write:
    """An acknowledged write."""

    node: str
    vbucket: int
    key: bytes
    number: int
    sent_s: float
    answered_s: float
    vbuuid: int
    seqno: int


class DurableWriter(threading.Thread):
    """Writes to one node, whatever the others do, until it is stopped. No other writer uses its keys."""

    def __init__(
        self, node: str, connect: Callable[[], BareConnection], *, vbuckets: int, keys: Iterable[bytes]
    ) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[Write] = []
        self.sent: dict[bytes, int] = {}
        """The highest number sent for each key, with any outcome."""
        self.unknown = self.refused = 0
        self.failure: BaseException | None = None
        self._node = node
        self._connect = connect
        self._vbuckets = vbuckets
        self._keys = list(keys)
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    connection = self._connect()
                except (OSError, AssertionError, KeyError):
                    self._stopped.wait(0.1)  # The node is starting, or asks the others first.
                    continue
                try:
                    self._write_all(connection)
                except OSError:
                    self.unknown += 1
                finally:
                    connection.close()
        except BaseException as error:
            self.failure = error

    def _write_all(self, connection: BareConnection) -> None:
        while not self._stopped.is_set():
            taken = sum(self._write(connection, key) for key in self._keys)
            self._stopped.wait(0.002 if taken else 0.05)

    def _write(self, connection: BareConnection, key: bytes) -> bool:
        number = self.sent[key] = self.sent.get(key, 0) + 1
        vbucket = vbucket_of(key, self._vbuckets)
        infos = b"\x13" + struct.pack(">BH", _MAJORITY, _DURABLE_MS)
        sent_s = time.monotonic()
        status, extras, _ = connection.ask(
            _SET, key=key, value=b"%d" % number, vbucket=vbucket, extras=bytes(8), infos=infos
        )
        answered_s = time.monotonic()
        if status == _SUCCESS:
            vbuuid, seqno = struct.unpack(">QQ", extras)
            self.acknowledged.append(Write(self._node, vbucket, key, number, sent_s, answered_s, vbuuid, seqno))
        elif status in _REFUSED:
            self.refused += 1
        else:
            self.unknown += 1
        return status == _SUCCESS


def check_never_two_actives(writes: Iterable[Write]) -> int:
    """Check that the reigns over each vbucket follow one another. Returns how many there were."""
    reigns: dict[int, dict[tuple[str, int], list[Write]]] = defaultdict(lambda: defaultdict(list))
    for write in writes:
        reigns[write.vbucket][write.node, write.vbuuid].append(write)
    for vbucket, by_branch in reigns.items():
        in_order = sorted(by_branch.values(), key=lambda reign: min(write.seqno for write in reign))
        for earlier, later in pairwise(in_order):
            last = max(earlier, key=lambda write: write.seqno)
            first = min(later, key=lambda write: write.seqno)
            assert last.seqno < first.seqno, f"vbucket {vbucket} has two changes {first.seqno}: {last}, {first}"
            # A write takes effect between its sending and its answer: there must be a moment between the two reigns.
            begun_s, over_s = max(write.sent_s for write in earlier), min(write.answered_s for write in later)
            assert begun_s <= over_s, f"vbucket {vbucket} has two active nodes: {last}, {first}"
    return sum(map(len, reigns.values()))


def check_none_lost(writers: Iterable[DurableWriter], read: Callable[[bytes], bytes]) -> int:
    """Check that every key has the last acknowledged value, or one that was sent later. Returns the number of keys."""
    keys = 0
    for writer in writers:
        newest: dict[bytes, int] = {}
        for write in writer.acknowledged:
            newest[write.key] = max(newest.get(write.key, 0), write.number)
        for key, number in newest.items():
            found = int(read(key))
            assert number <= found <= writer.sent[key], f"{key!r} has {found}, and {number} was acknowledged"
            keys += 1
    return keys
