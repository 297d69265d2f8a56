"""Every message survives the way to bytes and back, whatever its fields are."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import REQUESTS, RESPONSES, SERVER_REQUESTS, Message, decode_message
from support.cases import each
from support.message_strategies import MESSAGE_CLASSES, STRUCTURED, any_message, messages_of, structured_parts

FIXED_FIELDS: dict[type[Message], set[str]] = {
    # Server-initiated frames have no room for frame infos.
    **{cls: {"frame_infos"} for cls in SERVER_REQUESTS.values()},
    # A response to one opcode only has it as the default.
    **{cls: {"opcode"} for cls in RESPONSES.values() if len(cls.opcodes) == 1},
}
BY_NAME = [pytest.param(cls, id=cls.__name__) for cls in MESSAGE_CLASSES]


def decode(data: bytes, *, collections: bool) -> Message:
    (frame,) = decode_frames(data)
    return decode_message(frame, WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED)


# There are a hundred classes, and most of what a message is they share.
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data(), collections=st.booleans())
@pytest.mark.parametrize("cls", BY_NAME)
def test_message_decodes_to_itself(cls: type[Message], data: st.DataObject, collections: bool) -> None:
    message = data.draw(messages_of(cls, collections=collections))
    encoded = message.encode()
    decoded = decode(encoded, collections=collections)
    assert type(decoded) is cls
    assert decoded == message
    assert decoded.encode() == encoded


@given(data=st.data(), collections=st.booleans())
def test_messages_keep_their_order_in_one_stream(data: st.DataObject, collections: bool) -> None:
    messages = data.draw(st.lists(any_message(collections=collections), max_size=5))
    frames = decode_frames(b"".join(message.encode() for message in messages))
    negotiated = WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED
    assert [decode_message(frame, negotiated) for frame in frames] == messages


# --- the strategies themselves ------------------------------------------------------------------------------------


def test_every_registered_class_is_covered() -> None:
    registered = {*REQUESTS.values(), *RESPONSES.values(), *SERVER_REQUESTS.values()}
    assert registered <= set(MESSAGE_CLASSES)
    assert len(REQUESTS) + len(SERVER_REQUESTS) == len({*REQUESTS.values(), *SERVER_REQUESTS.values()})


def test_class_with_a_value_of_its_own_has_a_strategy_of_its_own() -> None:
    encoding = {cls for cls in MESSAGE_CLASSES if cls.encode_value is not Message.encode_value}
    assert encoding == {cls for cls in MESSAGE_CLASSES if structured_parts(cls) is not None}


def test_no_structured_strategy_is_left_over() -> None:
    assert set(STRUCTURED) <= {base for cls in MESSAGE_CLASSES for base in cls.__mro__}


@each("cls", BY_NAME)
def test_strategy_reaches_every_field(cls: type[Message]) -> None:
    """A field that no strategy ever sets would round-trip by its default only."""
    unseen = {field.name for field in fields(cls)} - FIXED_FIELDS.get(cls, set())

    @settings(max_examples=20, derandomize=True, database=None)
    @given(messages_of(cls, collections=True))
    def draw(message: Message) -> None:
        for field in fields(message):
            if getattr(message, field.name) not in (field.default, None):
                unseen.discard(field.name)

    draw()
    assert unseen == set()
