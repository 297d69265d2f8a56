"""Where the tables lie, and how vbuckets are put into groups.

    DIR/changes                            every change of every collection, in one table
    DIR/documents/<scope>.<collection>     one row a live document
    DIR/history/<scope>.<collection>       one row a version, with the time that it was valid
    DIR/rejects/<scope>.<collection>       the live documents that do not fit the typed columns

Neither a scope's name nor a collection's may have a dot, so the name of a table is read in one way only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pyarrow import fs

from headwater.errors import LakeDamaged, LakeTooNew

FORMAT_VERSION = 1
GROUPS_DEFAULT = 16
_PROPERTY = "headwater."


class TableKind(StrEnum):
    CHANGES = "changes"
    DOCUMENTS = "documents"
    HISTORY = "history"
    REJECTS = "rejects"


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFacts:
    """What is decided when a lake is made and never changes. It is kept in the properties of `changes`."""

    bucket_uuid: str
    vbuckets: int
    """Of the bucket."""
    groups: int = GROUPS_DEFAULT
    """Into how many parts the tables of documents are cut. A key is always in the same vbucket, and a vbucket always
    in the same group, so every group is merged by itself."""
    xattrs: bool = False
    """The tables have a column for extended attributes."""

    def __post_init__(self) -> None:
        assert 0 < self.groups <= self.vbuckets, "a group has at least one vbucket"

    def group_of(self, vbucket: Any) -> Any:
        """The group of a vbucket, or of an array of them. Groups are ranges, so that files can tell theirs by the
        least and the highest vbucket in them."""
        return vbucket * self.groups // self.vbuckets

    def vbuckets_of(self, group: int) -> range:
        first, end = (-(-edge * self.vbuckets // self.groups) for edge in (group, group + 1))
        return range(first, end)

    def to_properties(self) -> dict[str, str]:
        return {
            f"{_PROPERTY}format": str(FORMAT_VERSION),
            f"{_PROPERTY}bucket_uuid": self.bucket_uuid,
            f"{_PROPERTY}vbuckets": str(self.vbuckets),
            f"{_PROPERTY}groups": str(self.groups),
            f"{_PROPERTY}xattrs": str(self.xattrs).lower(),
        }

    @classmethod
    def from_properties(cls, properties: Mapping[str, str | None], *, where: str) -> Self:
        try:
            version = int(properties[f"{_PROPERTY}format"] or "")
            if version > FORMAT_VERSION:
                raise LakeTooNew(
                    f"{where} has format {version}, and this program knows formats up to {FORMAT_VERSION}",
                    hint="Use the version of Headwater that made it, or a newer one",
                )
            return cls(
                bucket_uuid=properties[f"{_PROPERTY}bucket_uuid"] or "",
                vbuckets=int(properties[f"{_PROPERTY}vbuckets"] or ""),
                groups=int(properties[f"{_PROPERTY}groups"] or ""),
                xattrs=properties[f"{_PROPERTY}xattrs"] == "true",
            )
        except (KeyError, ValueError) as error:
            raise LakeDamaged(
                f"the table at {where} was not made by Headwater, or its properties were changed",
                hint="Give another directory, or bring the table's log back from a backup",
            ) from error


@dataclass(frozen=True, slots=True)
class LakePlace:
    """The directory of a lake: a path, or a URI that both Arrow and delta-rs know."""

    root: str
    storage_options: Mapping[str, str] | None = None
    """For delta-rs, where the place is an object store."""

    def table(self, kind: TableKind, name: str | None = None) -> TablePlace:
        path = f"{self.root.rstrip('/')}/{kind}"
        return TablePlace(path if name is None else f"{path}/{name}", self.storage_options)


@dataclass(frozen=True, slots=True)
class TablePlace:
    """The directory of a table."""

    uri: str
    storage_options: Mapping[str, str] | None = None


def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URI, and the path on it."""
    if "://" in uri:
        filesystem, path = fs.FileSystem.from_uri(uri)
        return filesystem, path
    return fs.LocalFileSystem(), uri


def table_name(scope: str | None, collection: str | None, collection_id: int) -> str:
    """The table of a collection. One that was dropped before anybody told its name goes by its id, under a name that no
    scope can have."""
    if scope is None or collection is None:
        return f"_unnamed.{collection_id:x}"
    return f"{scope}.{collection}"
