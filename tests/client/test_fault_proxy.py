"""The proxy itself: what it passes is the beginning of what came, and what it does is what its plan says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.protocol.sasl import Credentials
from support.fault_proxy import (
    HOST,
    Action,
    Cut,
    Delay,
    Ending,
    FaultProxy,
    FaultSchedule,
    ProxiedNode,
    Split,
    Stall,
    Truncate,
    Way,
    no_faults,
)
from support.node_process import PASSWORD, USER

DATA = bytes(range(256)) * 400
SOCKET_S_MAX = 20.0
LOGIN = Login(credentials=Credentials(USER, PASSWORD), bucket="default")


class TalkingServer:
    """Sends `DATA` to whoever connects, takes what that one sends, and remembers how it ended."""

    def __init__(self) -> None:
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self.heard: list[tuple[bytes, type[OSError] | None]] = []
        self._has_heard = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            client.settimeout(SOCKET_S_MAX)
            threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with closing(client):
            heard = exchange(client)
            with self._has_heard:
                self.heard.append(heard)
                self._has_heard.notify()

    def first_heard(self) -> tuple[bytes, type[OSError] | None]:
        with self._has_heard:
            assert self._has_heard.wait_for(lambda: self.heard, SOCKET_S_MAX)
            return self.heard[0]

    def close(self) -> None:
        self._listening.close()


class Sending(threading.Thread):
    """Sends `DATA` while its maker reads."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self.error: type[OSError] | None = None
        self._sock = sock

    def run(self) -> None:
        try:
            self._sock.sendall(DATA)
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.error = type(error)


def exchange(sock: socket.socket) -> tuple[bytes, type[OSError] | None]:
    """Send `DATA`, and return what came and the error. A reset is one to the first who meets it, reader or writer."""
    sending = Sending(sock)
    sending.start()
    received, error = read_to_end(sock)
    sending.join()
    return received, error or sending.error


def read_to_end(sock: socket.socket) -> tuple[bytes, type[OSError] | None]:
    """What came, and the error in place of an end in good order."""
    data = bytearray()
    try:
        while piece := sock.recv(65536):
            data += piece
    except OSError as error:
        return bytes(data), type(error)
    return bytes(data), None


@pytest.fixture
def server() -> Iterator[TalkingServer]:
    with closing(TalkingServer()) as server:
        yield server


@pytest.fixture
def proxy(server: TalkingServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


def talk(proxy: FaultProxy, *actions: Action) -> tuple[bytes, type[OSError] | None]:
    """Connect, send `DATA`, and return what came of the server's."""
    proxy.use(lambda connection: actions)
    with socket.create_connection((HOST, proxy.port), timeout=SOCKET_S_MAX) as sock:
        return exchange(sock)


# --- what each action does ----------------------------------------------------------------------------------------


def test_without_faults_all_is_passed(server: TalkingServer, proxy: FaultProxy) -> None:
    assert talk(proxy) == (DATA, None)
    assert server.first_heard() == (DATA, None)
    assert proxy.counts.passed_bytes == dict.fromkeys(Way, len(DATA))


@pytest.mark.parametrize("after_bytes", [0, 1, 1000, 65_535, 65_536, 65_537, len(DATA) - 1])
def test_a_cut_in_good_order_passes_all_before_it(server: TalkingServer, proxy: FaultProxy, after_bytes: int) -> None:
    assert talk(proxy, Cut(Way.TO_CLIENT, after_bytes, Ending.FIN)) == (DATA[:after_bytes], None)
    heard, _ = server.first_heard()
    assert DATA.startswith(heard)
    assert proxy.counts.ended == 1


def test_a_reset_is_one_for_both(server: TalkingServer, proxy: FaultProxy) -> None:
    # The other way is held up, or else it might have ended in good order before.
    received, error = talk(proxy, Stall(Way.TO_CLIENT, 300), Cut(Way.TO_SERVER, 5000, Ending.RESET))
    assert error in (ConnectionResetError, BrokenPipeError)
    assert DATA[:300].startswith(received)
    heard, error = server.first_heard()
    assert error in (ConnectionResetError, BrokenPipeError)
    assert DATA[:5000].startswith(heard)


def test_a_truncation_leaves_the_other_way_open(server: TalkingServer, proxy: FaultProxy) -> None:
    received, _ = talk(proxy, Truncate(Way.TO_SERVER, 300))
    assert received == DATA, "whether the rest could be sent is a matter of time"
    assert server.first_heard() == (DATA[:300], None)


def test_a_stall_is_silence(proxy: FaultProxy) -> None:
    proxy.use(lambda connection: (Stall(Way.TO_CLIENT, 300),))
    with socket.create_connection((HOST, proxy.port), timeout=0.3) as sock:
        assert read_to_end(sock) == (DATA[:300], TimeoutError)


def test_pieces_are_the_bytes_as_they_were(server: TalkingServer, proxy: FaultProxy) -> None:
    splits = [Split(way, 3000, piece, seed=1) for way, piece in zip(Way, (1, 7), strict=True)]
    assert talk(proxy, *splits, Delay(Way.TO_CLIENT, 1500, 0.01), Delay(Way.TO_SERVER, 0, 0.01)) == (DATA, None)
    assert server.first_heard() == (DATA, None)


def test_single_bytes_arrive_in_pieces(proxy: FaultProxy) -> None:
    """Some of them: what comes while a reader is busy is one read to it."""
    proxy.use(lambda connection: (Split(Way.TO_CLIENT, 2000, 1), Cut(Way.TO_CLIENT, 2000, Ending.FIN)))
    sizes = []
    with socket.create_connection((HOST, proxy.port), timeout=SOCKET_S_MAX) as sock:
        while piece := sock.recv(65536):
            sizes.append(len(piece))
    assert sum(sizes) == 2000
    assert len(sizes) > 1


def test_another_plan_ends_what_was_open(proxy: FaultProxy) -> None:
    proxy.use(lambda connection: (Stall(Way.TO_CLIENT, 1),))
    with socket.create_connection((HOST, proxy.port), timeout=SOCKET_S_MAX) as sock:
        assert sock.recv(1) == DATA[:1]
        proxy.use(no_faults)
        assert read_to_end(sock) == (b"", ConnectionResetError)
    assert proxy.counts.connections == 0
    assert talk(proxy) == (DATA, None)


# --- schedules ----------------------------------------------------------------------------------------------------


def test_schedules_have_every_kind_of_fault() -> None:
    actions = [action for seed in range(200) for number in range(6) for action in FaultSchedule(seed)(number)]
    assert {type(action) for action in actions} == {Cut, Truncate, Delay, Split}
    assert {(action.way, action.ending) for action in actions if isinstance(action, Cut)} == {
        (way, ending) for way in Way for ending in Ending
    }
    positions = [action.after_bytes for action in actions if isinstance(action, Cut) and action.way is Way.TO_CLIENT]
    # The log-in, the opening of the streams, and the streams.
    assert min(positions) < 20
    assert sum(100 < position < 1000 for position in positions) > 50
    assert max(positions) > 20_000


# --- in front of a node -------------------------------------------------------------------------------------------


def test_the_map_of_a_node_leads_to_the_proxy(shared_node: ProxiedNode) -> None:
    shared_node.proxy.use(no_faults)
    address = Address(HOST, shared_node.proxy.port)
    for connect in (lambda: KvConnection.open(address, LOGIN), lambda: shared_node.connect_directly("default")):
        with connect() as connection:
            assert connection.outcome.cluster_config is not None
            found = ClusterMap.decode(connection.outcome.cluster_config, asked=connection.address)
        assert found.nodes == (address,)
    assert shared_node.proxy.counts.connections == 1
