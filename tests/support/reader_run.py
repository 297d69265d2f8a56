"""A reader, a cluster in memory and a caller, with the wires between them and a clock that stands until it is moved."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from typing import Any, BinaryIO

from headwater.client.cluster_map import ClusterMap
from headwater.client.handshake import ClientHandshake
from headwater.client.links import SCOUT, CloseConnection, DcpLink, DcpOpening, OpenConnection, Slot
from headwater.client.pieces import ChangeRun, Piece, RollbackPiece
from headwater.client.read_options import ReadOptions, Snapshots
from headwater.client.reader import Reader, ReaderEnvironment
from headwater.errors import ConnectionFailed
from headwater.protocol.consumer import DcpControl
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Mutation
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamFlags
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.reader_world import Cluster, Connection

VBUCKETS = 6


class Consumer:
    """What a caller makes of the pieces: all rows that no rollback took back."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[bytes, bytes | None]]] = {vbucket: {} for vbucket in range(VBUCKETS)}
        self.rollbacks = 0

    def take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            rows = self.rows[piece.vbucket]
            if isinstance(piece, RollbackPiece):
                assert max(rows, default=0) > piece.seqno, "a rollback takes something back"
                self.rows[piece.vbucket] = {seqno: row for seqno, row in rows.items() if seqno <= piece.seqno}
                self.rollbacks += 1
            else:
                assert isinstance(piece, ChangeRun)
                self._take_run(piece, rows)

    def _take_run(self, run: ChangeRun, rows: dict[int, tuple[bytes, bytes | None]]) -> None:
        for frame in decode_frames(bytes(run.data)):
            message = decode_message(frame, WITH_COLLECTIONS)
            assert isinstance(message, Mutation | Deletion)
            assert message.vbucket == run.vbucket
            assert max(rows, default=0) < message.seqno <= run.snapshot_end, "seqnos rise, inside the snapshot"
            rows[message.seqno] = (message.key, None if isinstance(message, Deletion) else message.value)

    def contents(self, vbucket: int) -> dict[bytes, bytes]:
        newest = dict(row for _, row in sorted(self.rows[vbucket].items()))
        return {key: value for key, value in newest.items() if value is not None}


class Run:
    """A reader, its cluster, and the wires between them."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(self.rng, nodes=self.rng.randint(1, 4), vbuckets=VBUCKETS)
        self.now_s = 0.0
        self.may_fail = False
        self.wires: dict[int, Connection] = {}
        self.consumer = Consumer()
        self.files: list[BinaryIO] = []
        """All that the reader has ever opened."""
        self.options = ReadOptions(
            snapshots=self.rng.choice(list(Snapshots)),
            buffer_bytes=self.rng.choice([1024, 4096, 1 << 20]),
            held_bytes_max=self.rng.choice([0, 1 << 20]),
            batch_bytes=self.rng.choice([1, 200, 1 << 20]),
            connections_per_node=self.rng.randint(1, 2),
            give_up_after_s=None,
        )
        self.options = replace(self.options, **options)
        self.reader = self.new_reader({VBucketId(vbucket): StreamOffset() for vbucket in range(VBUCKETS)})

    def new_reader(self, offsets: dict[VBucketId, StreamOffset], *, from_now: bool = False) -> Reader:
        return Reader(
            self.options,
            cluster_map=self.decode_map(self.cluster.config()),
            seeds=(self.cluster.nodes[0],),
            offsets=offsets,
            from_now=from_now,
            stream_flags=StreamFlags(0),
            stream_value=b"",
            environment=ReaderEnvironment(
                new_link=self.new_link,
                decode_map=lambda config, _: self.decode_map(config),
                open_spool=self.open_file,
                random=self.rng.random,
            ),
            now_s=self.now_s,
        )

    def open_file(self) -> BinaryIO:
        self.files.append(io.BytesIO())
        return self.files[-1]

    def decode_map(self, config: bytes) -> ClusterMap:
        return ClusterMap.decode(config, asked=self.cluster.nodes[0])

    def new_link(self, slot: Slot, is_loopback: bool, now_s: float) -> DcpLink:
        opening = DcpOpening(
            name=f"test:{slot.id}",
            flags=OpenFlags.PRODUCER,
            controls=(
                DcpControl(key="enable_noop", value="true"),
                DcpControl(key="connection_buffer_size", value=str(self.options.buffer_bytes)),
            ),
            buffer_bytes=self.options.buffer_bytes,
            noop_interval_s=1000,
        )
        handshake = ClientHandshake(credentials=None, bucket="travel", nonce=b"")
        return DcpLink(handshake, None if slot.lane == SCOUT else opening, now_s=now_s)

    # --- time and wires -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A moment passes: some bytes travel, and the caller may take something."""
        self.now_s += self.rng.choice([0.01, 0.1, 0.5])
        self.reader.tick(self.now_s)
        self.obey()
        for connection in self.wires.values():
            connection.pump()
        for link, connection in list(self.wires.items()):
            self._deliver(link, connection)
        if self.rng.random() < 0.7:
            self.consumer.take(self.reader.take())
        assert self.may_fail or self.reader.failure is None

    def obey(self) -> None:
        for command in self.reader.commands():
            match command:
                case OpenConnection(id=link, address=address):
                    self._connect(link, self.cluster.nodes.index(address))
                case CloseConnection(id=link):
                    self._hang_up(link)
        for link, data in self.reader.data_to_send():
            if link in self.wires:
                self.wires[link].receive_data(data)

    def _connect(self, link: int, node: int) -> None:
        if not self.cluster.is_up[node]:
            self.reader.on_lost(link, ConnectionFailed("nobody is there"), now_s=self.now_s)
            return
        self.wires[link] = Connection(self.cluster, node)
        self.cluster.connections.append(self.wires[link])
        self.reader.on_connected(link, is_loopback=True, now_s=self.now_s)

    def _hang_up(self, link: int) -> None:
        connection = self.wires.pop(link, None)
        if connection is not None:
            self.cluster.connections.remove(connection)

    def _deliver(self, link: int, connection: Connection) -> None:
        count = len(connection.outbox) if self.rng.random() < 0.5 else self.rng.randint(0, len(connection.outbox))
        self.deliver(link, connection, count)

    def deliver(self, link: int, connection: Connection, count: int) -> None:
        """That many bytes arrive at the reader; a connection that is cut ends behind them."""
        data = bytes(connection.outbox[:count])
        del connection.outbox[:count]
        while data:
            buffer = self.reader.receive_buffer(link)
            if buffer is None:
                return
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            self.reader.received(link, len(part), now_s=self.now_s)
            data = data[len(part) :]
        if connection.is_cut and link in self.wires:
            self._hang_up(link)
            self.reader.on_lost(link, None, now_s=self.now_s)

    # --- the whole run --------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        events = [self.cluster.write] * 12 + [self.cluster.fail_over, self.cluster.rebalance, self.cluster.cut]
        events += [self.cluster.orphan, self._leave_and_follow]
        events += [self.cluster.toggle_node, self.restart] if self.rng.random() < 0.3 else []
        self.rng.choice(events)()

    def _leave_and_follow(self) -> None:
        """As when a vbucket of a group's member was lost and taken again."""
        vbucket = VBucketId(self.rng.randrange(VBUCKETS))
        place = self.reader.offsets[vbucket]
        self.reader.close_vbuckets([vbucket])
        self.reader.follow({vbucket: place}, now_s=self.now_s)

    def restart(self) -> None:
        """The consumer stops, and goes on from the offsets it has saved with its rows."""
        for link in list(self.wires):
            self._hang_up(link)
        self.reader.close()
        self.reader = self.new_reader(self.reader.offsets)

    def settle(self) -> None:
        self.cluster.calm_down()
        for _ in range(600):
            self.step()
            if self._is_settled():
                return
        raise AssertionError("the reader does not come to rest")

    def _is_settled(self) -> bool:
        offsets = self.reader.offsets
        return not self.reader.has_pieces and all(
            (offsets[VBucketId(number)].seqno, offsets[VBucketId(number)].vbuuid)
            == (vbucket.high, vbucket.log.newest.vbuuid)
            for number, vbucket in enumerate(self.cluster.vbuckets)
        )

    def check(self) -> None:
        for number, vbucket in enumerate(self.cluster.vbuckets):
            assert self.consumer.contents(number) == vbucket.contents(), f"vbucket {number}"
        for link, connection in list(self.wires.items()):
            self.deliver(link, connection, len(connection.outbox))
        self.obey()
        for connection in self.wires.values():
            assert connection.unacked_bytes * 5 <= self.options.buffer_bytes, "all that was taken is acknowledged"
        assert (self.reader.metrics.ready_bytes, self.reader.metrics.held_bytes) == (0, 0)
        self.reader.close()
        assert all(file.closed for file in self.files), "no file is left open"
