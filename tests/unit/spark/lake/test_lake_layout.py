"""Groups of vbuckets, the places of tables, and the facts in a table's properties."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.errors import LakeDamaged, LakeTooNew
from headwater.lake.layout import LakeFacts, LakePlace, TableKind, table_name


@pytest.mark.parametrize(("vbuckets", "groups"), [(1024, 16), (64, 16), (5, 2), (7, 7), (1, 1), (100, 33)])
def test_every_vbucket_is_in_the_one_group_that_has_it(vbuckets: int, groups: int) -> None:
    facts = LakeFacts(bucket_uuid="u", vbuckets=vbuckets, groups=groups)
    found = [vbucket for group in range(groups) for vbucket in facts.vbuckets_of(group)]
    assert found == list(range(vbuckets))
    for group in range(groups):
        assert {facts.group_of(vbucket) for vbucket in facts.vbuckets_of(group)} == {group}
    assert facts.group_of(np.arange(vbuckets)).tolist() == [facts.group_of(vbucket) for vbucket in range(vbuckets)]


def test_facts_come_back_from_the_properties() -> None:
    facts = LakeFacts(bucket_uuid="5ab1e", vbuckets=64, groups=8, xattrs=True)
    assert LakeFacts.from_properties(facts.to_properties(), where="here") == facts


def test_a_table_that_is_not_ours_is_told() -> None:
    with pytest.raises(LakeDamaged, match="not made by Headwater"):
        LakeFacts.from_properties({"delta.appendOnly": "true"}, where="here")


def test_a_newer_format_is_refused() -> None:
    properties = {**LakeFacts(bucket_uuid="u", vbuckets=64).to_properties(), "headwater.format": "2"}
    with pytest.raises(LakeTooNew, match="format 2"):
        LakeFacts.from_properties(properties, where="here")


def test_tables_have_their_places() -> None:
    place = LakePlace("/lake/")
    assert place.table(TableKind.CHANGES).uri == "/lake/changes"
    assert place.table(TableKind.REJECTS, "inventory.hotel").uri == "/lake/rejects/inventory.hotel"


def test_a_collection_without_a_name_goes_by_its_id() -> None:
    assert table_name("inventory", "hotel", 8) == "inventory.hotel"
    assert table_name(None, None, 0x1F) == table_name("inventory", None, 0x1F) == "_unnamed.1f"
