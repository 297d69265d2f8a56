"""Messages that set a connection up: HELLO, SASL, bucket, error map, cluster config; and minor requests.

The layouts are those of kv_engine's docs/BinaryProtocol.md.
"""

from __future__ import annotations

from struct import Struct

from headwater.errors import MalformedMessage
from headwater.protocol.features import Feature, Magic, Opcode, ServerOpcode
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.messages.base import NO_FIELDS, Layout, Request, Response, ValueCodec, message, u16, u32, u64

_U16 = Struct(">H")
FEATURES_MAX = 256
"""The most features of one HELLO. Couchbase knows about 40, and each one costs work before anybody has logged in."""


def _decode_features(value: bytes) -> tuple[Feature, ...]:
    if len(value) % _U16.size:
        raise MalformedMessage("HELLO features are 16 bits each", offset=HEADER_BYTES)
    if len(value) > FEATURES_MAX * _U16.size:
        raise MalformedMessage(f"HELLO has more than {FEATURES_MAX} features", offset=HEADER_BYTES)
    return tuple(Feature(number) for (number,) in _U16.iter_unpack(value))


_FEATURES = ValueCodec("features", lambda features: b"".join(map(_U16.pack, features)), _decode_features)


@message(Opcode.HELLO)
class Hello(Request):
    value_codec = _FEATURES

    key: bytes = b""
    """The agent's name, often JSON."""
    features: tuple[Feature, ...] = ()


@message(Opcode.HELLO)
class HelloResponse(Response):
    """The features that the server agrees to, out of those that the client asked for."""

    value_codec = _FEATURES

    opcode: Opcode = Opcode.HELLO
    features: tuple[Feature, ...] = ()


@message(Opcode.SASL_LIST_MECHS)
class SaslListMechanisms(Request): ...


@message(Opcode.SASL_AUTH)
class SaslAuth(Request):
    key: bytes
    """The mechanism."""
    value: bytes = b""


@message(Opcode.SASL_STEP)
class SaslStep(SaslAuth): ...


@message(Opcode.SELECT_BUCKET)
class SelectBucket(Request):
    key: bytes = b""
    """An empty name deselects the bucket."""


@message(Opcode.GET_ERROR_MAP)
class GetErrorMap(Request):
    value_layout = Layout(u16("version"))

    version: int


_CONFIG_VERSION = Layout(u64("epoch"), u64("revision"))


@message(Opcode.GET_CLUSTER_CONFIG)
class GetClusterConfig(Request):
    """The cluster config, or nothing if the server has none newer than the version given."""

    layouts = (NO_FIELDS, _CONFIG_VERSION)

    epoch: int | None = None
    revision: int | None = None


@message(Opcode.SET_CLUSTER_CONFIG)
class SetClusterConfig(Request):
    layouts = (_CONFIG_VERSION,)

    epoch: int
    revision: int
    key: bytes = b""
    """The bucket, or empty for the cluster's own config."""
    value: bytes


@message(ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION)
class ClustermapChangeNotification(Request):
    """Server-initiated: the cluster map has changed. Before epochs the version was one 32-bit revision."""

    magic = Magic.SERVER_REQUEST
    layouts = (_CONFIG_VERSION, Layout(u32("revision")))

    epoch: int | None = None
    revision: int
    key: bytes = b""
    value: bytes = b""


# --- minor requests -----------------------------------------------------------------------------------------------


@message(Opcode.NOOP)
class Noop(Request): ...


@message(Opcode.VERSION)
class Version(Request): ...


@message(Opcode.QUIT)
class Quit(Request): ...


@message(Opcode.QUITQ)
class QuitQuiet(Quit): ...


@message(Opcode.FLUSH)
class Flush(Request):
    """Drop all documents of the bucket. The delay is memcached's; 0 or absent."""

    layouts = (NO_FIELDS, Layout(u32("delay_s")))

    delay_s: int | None = None


@message(Opcode.FLUSHQ)
class FlushQuiet(Flush): ...


@message(Opcode.STAT)
class Stat(Request):
    """Statistics of a group, as one response per statistic and an empty one at the end."""

    key: bytes = b""
    value: bytes = b""


@message(Opcode.VERBOSITY)
class Verbosity(Request):
    layouts = (Layout(u32("level")),)

    level: int
