"""The memory that streams write to."""

from __future__ import annotations

from headwater.node.producer.outbound import OUTPUT_BYTES, Output, SpareOutput


def test_what_is_appended_lies_in_order_and_the_memory_grows_under_it() -> None:
    output = Output(8)
    for piece in (b"abc", b"", b"defgh", b"i" * 100):
        output.append(piece)
    assert bytes(output.data) == b"abcdefgh" + b"i" * 100
    output.make_room(1000)
    assert bytes(output.data) == b"abcdefgh" + b"i" * 100
    assert len(output.memory) - output.used >= 1000


def test_the_spare_output_is_used_again_and_empty() -> None:
    spare = SpareOutput()
    first = spare.take()
    first.append(b"sent")
    spare.give_back(first)
    assert spare.take() is first
    assert first.used == 0


def test_nobody_gets_an_output_that_is_still_looked_at() -> None:
    spare = SpareOutput()
    kept = spare.take()
    kept.append(b"being sent")
    other = spare.take()
    other.append(b"x" * 100)
    assert bytes(kept.data) == b"being sent"


def test_an_output_that_has_grown_is_not_kept() -> None:
    spare = SpareOutput()
    grown = spare.take()
    grown.append(bytes(OUTPUT_BYTES + 1))
    spare.give_back(grown)
    assert len(spare.take().memory) == OUTPUT_BYTES
