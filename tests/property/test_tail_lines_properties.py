"""The lines of `tail --json` say what the typed changes say, for any batch."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.client.changes import changes_of
from headwater.transfer.change_lines import ChangeLines
from support.commands import batch_of, document, event, rollback

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
values = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(
        errors="surrogatepass"
    ),
    json_values,
    st.sampled_from([None, 0, 2]),
    st.booleans(),
) | st.binary(max_size=40)
keys = st.text(min_size=1, max_size=20).map(lambda text: text.encode(errors="replace")) | st.binary(min_size=1)

documents = st.builds(
    document,
    op=st.sampled_from(["mutation", "deletion", "expiration"]),
    vbucket=U16,
    vbuuid=U64,
    seqno=U64,
    rev=U64,
    collection_id=U32,
    collection=st.none() | st.text(max_size=5),
    key=keys,
    value=values,
    datatype=st.sampled_from([0, 1]),
    flags=U32,
    expiry=U32,
    cas=U64,
    xattrs=st.none()
    | st.lists(st.tuples(st.text(max_size=4), values), min_size=1, max_size=2, unique_by=lambda p: p[0]),
)
removals = documents.map(lambda row: {**row, "op": "deletion", "value": None})
rows = documents | removals | st.just(rollback()) | st.just(event("collection_dropped"))


@given(st.lists(rows, min_size=1, max_size=8), st.booleans(), st.integers(0, 7))
def test_lines_are_the_typed_changes(made: list[dict[str, Any]], xattrs: bool, skipped: int) -> None:
    batch = batch_of(*made, xattrs=xattrs)
    batch = batch.slice(min(skipped, len(made) - 1))
    text = bytes(ChangeLines(no_value=False).encode(batch))
    lines = text.split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line) for line in lines] == [change.to_dict() for change in changes_of(batch)]
