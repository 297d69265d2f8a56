"""A writer that sets, overwrites and deletes documents of a bounded key space, and records their current versions."""

from __future__ import annotations

import random
import struct
import threading
import time

import numpy as np

from support.node_process import NodeProcess
from support.streams import key_of, value_of, vbucket_of

DELETES_SHARE = 0.15
HOT_SHARE = 0.5
"""The share of writes to a small part of the documents, so that these change several times within a snapshot."""
HOT_PART = 50
BATCH = 500
ANSWER_BYTES = 24
HEADER = struct.Struct(">BBHBBHIIQ")
SET, DELETE, GET = 0x01, 0x04, 0x00
DEFAULT_COLLECTION_PREFIX = b"\x00"


class DocumentWriter(threading.Thread):
    """Writes in batches, with a maximum rate, until it is stopped. Every write is answered."""

    def __init__(self, node: NodeProcess, *, documents: int, vbuckets: int, writes_per_s: float, seed: int) -> None:
        super().__init__(name="writer")
        self.versions = np.zeros(documents, dtype=np.uint64)
        """The version of each document; 0 if it does not exist."""
        self.writes = 0
        self.failure: BaseException | None = None
        self._connection = node.connect()
        self._random = random.Random(seed)
        self._writes_per_s = writes_per_s
        self._batch_writes = BATCH
        self._keys = [key_of(number) for number in range(documents)]
        self._vbuckets = [vbucket_of(key, vbuckets) for key in self._keys]
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            began_s, first = time.monotonic(), self.writes
            while not self._stopping.is_set():
                self._write_batch()
                self._stopping.wait(max(0.0, began_s + (self.writes - first) / self._writes_per_s - time.monotonic()))
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._stopping.set()
        self.join()
        if self.failure is not None:
            raise self.failure

    def _write_batch(self) -> None:
        self._connection.sock.sendall(b"".join(self._next_write() for _ in range(self._batch_writes)))
        answers = self._receive(self._batch_writes * ANSWER_BYTES)
        for at in range(0, len(answers), ANSWER_BYTES):
            assert answers[at : at + 12] in _SUCCESSES, f"a write was refused: {answers[at : at + ANSWER_BYTES]!r}"

    def _next_write(self) -> bytes:
        self.writes += 1
        documents = len(self._keys)
        is_hot = self._random.random() < HOT_SHARE
        number = self._random.randrange(max(1, documents // HOT_PART) if is_hot else documents)
        if self.versions[number] and self._random.random() < DELETES_SHARE:
            self.versions[number] = 0
            return self._request(DELETE, number)
        self.versions[number] = self.writes
        return self._request(SET, number, extras=bytes(8), value=value_of(self.writes))

    def _request(self, opcode: int, number: int, *, extras: bytes = b"", value: bytes = b"") -> bytes:
        key = DEFAULT_COLLECTION_PREFIX + self._keys[number]
        size = len(extras) + len(key) + len(value)
        header = HEADER.pack(0x80, opcode, len(key), len(extras), 0, self._vbuckets[number], size, number, 0)
        return header + extras + key + value

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += self._connection.sock.recv(size - len(data)) or self._raise_closed()
        return bytes(data)

    def _raise_closed(self) -> bytes:
        raise AssertionError("the node has closed the writer's connection")

    def stored_versions(self) -> np.ndarray:
        """Return the version of each document, as the node answers it now."""
        found = np.zeros(len(self._keys), dtype=np.uint64)
        for number in range(len(self._keys)):
            self._connection.sock.sendall(self._request(GET, number))
            header = HEADER.unpack(self._receive(HEADER.size))
            body = self._receive(header[6])
            assert header[5] in (0, 1), f"a read was refused with status {header[5]:#x}"
            if header[5] == 0:
                value = body[header[3] :]
                found[number] = int(value[:12])
                assert value == value_of(int(found[number]))
        return found

    def close(self) -> None:
        self._connection.close()


_SUCCESSES = {bytes([0x81, opcode]) + bytes(10) for opcode in (SET, DELETE)}
