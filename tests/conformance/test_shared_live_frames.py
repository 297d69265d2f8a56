"""Live changes are encoded once for all streams of a kind, and every stream gets what it would have made itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from headwater.node.producer.stream import NO_KIND, Stream
from headwater.protocol.features import Feature
from headwater.protocol.frames import Frame, encode_frame_infos, stream_id
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import OpenFlags
from headwater.protocol.stream_requests import StreamRequestValue
from support.dcp_world import COLLECTIONS, PLAIN, Consumer, World

VBUCKETS = 3
STEPS = 60
FRUIT = 8


@dataclass(frozen=True)
class Form:
    """What a consumer asks for."""

    features: tuple[Feature, ...] = COLLECTIONS
    flags: OpenFlags = OpenFlags.PRODUCER
    controls: tuple[tuple[str, str], ...] = ()
    collections: tuple[int, ...] | None = None
    has_id: bool = False


FORMS = [
    Form(),
    Form(features=PLAIN),
    Form(flags=OpenFlags.PRODUCER | OpenFlags.INCLUDE_XATTRS | OpenFlags.NO_VALUE),
    Form(controls=(("force_value_compression", "true"), ("max_marker_version", "2.2"))),
    Form(collections=(FRUIT,)),
    Form(controls=(("enable_stream_id", "true"),), has_id=True),
]


def opened(world: World, form: Form, number: int) -> Consumer:
    consumer = world.consumer(features=form.features, flags=form.flags, **dict(form.controls))
    value = StreamRequestValue(collections=form.collections, sid=number if form.has_id else None).encode()
    for vbucket in range(VBUCKETS):
        consumer.open(vbucket=vbucket, opaque=number << 8 | vbucket, value=value)
    return consumer


def taken(consumer: Consumer, form: Form, number: int) -> list[Frame]:
    """What the consumer gets now, without what says whose it is."""
    frames = [frame for frame in consumer.frames() if frame.magic.is_request]
    for frame in frames:
        assert frame.opaque == number << 8 | frame.specific
        assert frame.framing_extras == (encode_frame_infos((stream_id(number),)) if form.has_id else b"")
    return [replace(frame, opaque=0, framing_extras=b"") for frame in frames]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_stream_that_copies_gets_what_it_would_have_made(world: World, form: Form) -> None:
    rng = random.Random(17)
    manifest = world.set_manifest(Manifest().with_collection("_default", "fruit"))
    consumers = {number: opened(world, form, number) for number in (1, 2, 3)}
    assert consumers[3].session.dcp is not None
    for stream in consumers[3].session.dcp.streams.values():
        stream._kind = NO_KIND
    copied: list[bool] = []
    copy_live = Stream._copy_live
    with patch.object(Stream, "_copy_live", lambda *args: copied.append(copy_live(*args)) or copied[-1]):
        for step in range(STEPS):
            for _ in range(rng.randrange(1, 4)):
                collection = rng.choice([0, FRUIT])
                if rng.random() < 0.2:
                    world.remove(f"k{rng.randrange(6)}", collection=collection)
                else:
                    world.put(f"k{rng.randrange(6)}", collection=collection, vbucket=rng.randrange(VBUCKETS))
            if step == STEPS // 2:
                manifest = world.set_manifest(manifest.with_collection("_default", "more"))
            world.settle() if rng.random() < 0.2 else world.commit()
            in_any_order = rng.sample(sorted(consumers), 3)
            one, other, alone = (taken(consumers[number], form, number) for number in in_any_order)
            assert one == other == alone
    assert sum(copied) > STEPS // 4
