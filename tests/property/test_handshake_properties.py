"""The client's handshake: cut anywhere, its outcome is the same; and junk raises only what is documented."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from headwater.client.handshake import ClientHandshake, HandshakeState
from headwater.errors import RemoteProtocolError, StatusError, TlsFailed
from headwater.protocol.features import Opcode
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.session import ClustermapChangeNotification, HelloResponse
from headwater.protocol.sasl import Credentials, encode_nonce

NONCE = encode_nonce(b"client" * 3)
CONFIG = b'{"rev": 1}'
HELLO = HelloResponse(opaque=0).encode()
SELECTED = PlainResponse(opcode=Opcode.SELECT_BUCKET, opaque=1).encode()
CONFIGURED = PlainResponse(opcode=Opcode.GET_CLUSTER_CONFIG, opaque=2, value=CONFIG).encode()
PUSHED = ClustermapChangeNotification(epoch=1, revision=7, value=b"{}").encode()


def handshake(credentials: Credentials | None = None) -> ClientHandshake:
    return ClientHandshake(credentials=credentials, bucket="travel", nonce=NONCE)


@given(
    pushes=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    trailing=st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_cut_anywhere_the_outcome_is_the_same(pushes: tuple[int, int], trailing: bytes, cuts: list[int]) -> None:
    data = HELLO + PUSHED * pushes[0] + SELECTED + PUSHED * pushes[1] + CONFIGURED + trailing
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    client, at = handshake(), 0
    for end in ends:
        if client.outcome is not None:
            break
        client.receive_data(data[at:end])
        at = end
    assert client.outcome is not None
    assert client.outcome.cluster_config == CONFIG
    assert [frame.encode() for frame in client.pushed] == [PUSHED] * sum(pushes)
    assert client.trailing_data + data[at:] == trailing


@given(st.lists(st.binary(max_size=80), max_size=5), st.booleans(), st.sampled_from([b"", HELLO, HELLO + SELECTED]))
def test_junk_raises_only_what_is_documented(junk: list[bytes], logs_in: bool, good: bytes) -> None:
    client = handshake(Credentials("ann", "pencil") if logs_in else None)
    with suppress(RemoteProtocolError, StatusError, TlsFailed):
        for data in (good, *junk):
            client.receive_data(data)
            if client.outcome is not None:
                break
        return
    assert client.state is HandshakeState.FAILED
