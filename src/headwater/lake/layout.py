"""Where the tables lie, which columns they have, and how vbuckets are divided into groups.

    DIR/changes                            every change of every collection, in one table
    DIR/documents/<scope>.<collection>     one row per live document
    DIR/history/<scope>.<collection>       one row per version, with the time that it was valid
    DIR/rejects/<scope>.<collection>       the live documents that do not fit the typed columns

Names of scopes and collections can't contain a dot, so a table's name is unambiguous. The folder of a table has the
table's name, except for characters that paths can't have (`folder_name`). All modules of the lake use this one. It
defines a file format: tables of earlier versions must stay readable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.client.batches import OPS
from headwater.client.changes import split_keys
from headwater.errors import LakeDamaged, LakeTooNew
from headwater.lake.variants import VARIANT, to_variants
from headwater.protocol.values import Datatype

FORMAT_VERSION = 6
"""The format of the tables. In format 1 every commit has the whole state in its metadata; from format 2 on most have
the difference from an earlier commit; from format 6 on the state is in a file that the commit names (`delta_log`). From
format 3 on tables may have more groups than they were created with; from format 4 on small tables have fewer than the
lake. Format 5 is for lakes that leave rows out (`chosen_rows`) or have documents as variants.

Every format can be read. The next commit upgrades a table to the current one, in the same entry: otherwise earlier
versions would ignore that commit, and land its rows again."""
FORMAT_PROPERTY = "headwater.format"
STATE_FOLDER = "_headwater_state"
"""In each table: the files that record what it holds. Readers, and VACUUM of other tools, ignore folders that begin
with an underscore."""
DOCUMENT_PROPERTY = "headwater.document"
"""The form of documents, if it is not a string."""
GROUPS_TRANSACTION = "headwater.groups"
"""For a table that has been split into more groups: how many. It is in the commit that has split it."""
SMALL_GROUP_DOCUMENTS = 4096
"""A table has fewer groups than the lake as long as a group would have fewer documents than this: each group costs one
more file, and a small table is merged quickly anyway."""
GROUPS_MIN = 16
GROUP_DOCUMENTS = 500_000
"""For this many documents a merge holds the keys in memory, and writes some hundred megabytes if all have changed."""
_GROWTH_MAX = 4
EVERY_COLLECTION = "*"
"""In settings by table: the value for all others."""
_PROPERTY = "headwater."


class DocumentForm(StrEnum):
    """The type of the column `document`."""

    STRING = "string"
    """The text of the document."""
    VARIANT = "variant"


class TableKind(StrEnum):
    CHANGES = "changes"
    DOCUMENTS = "documents"
    HISTORY = "history"
    REJECTS = "rejects"


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFacts:
    """What is decided when a lake is created, and kept in the properties of `changes`. Only the number of groups may
    grow later (`GROUPS_TRANSACTION`)."""

    bucket_uuid: str
    vbuckets: int
    """Of the bucket."""
    groups: int = GROUPS_MIN
    """The number of parts of large tables of documents. A key is always in the same vbucket, and a vbucket always in
    the same group, so every group is merged by itself. When the number is doubled, each group is split in two."""
    xattrs: bool = False
    """Whether the tables have a column for extended attributes."""
    document: DocumentForm = DocumentForm.STRING
    """In all tables but `changes`."""
    transform: str | None = None
    """The name of the function that all changes went through (`Transform`)."""
    bucket_name: str | None = None
    """The bucket's name and address, for messages only: the UUID identifies it. None in older lakes."""

    def __post_init__(self) -> None:
        assert 0 < self.groups <= self.vbuckets, "a group has at least one vbucket"

    def group_of(self, vbucket: Any) -> Any:
        """Return the group of a vbucket, or of an array of them. Groups are ranges, so that files can be assigned by
        the lowest and the highest vbucket in them."""
        return vbucket * self.groups // self.vbuckets

    def vbuckets_of(self, group: int) -> range:
        first, end = (-(-edge * self.vbuckets // self.groups) for edge in (group, group + 1))
        return range(first, end)

    def grown(self, documents: int) -> int:
        """Return how many groups the tables should have for this many documents: the number is doubled until no group
        has more than twice its intended size. A task writes all groups that one is split into at once, and holds a row
        group for each, so one call at most multiplies by `_GROWTH_MAX`; the rest follows next time."""
        groups = self.groups
        while documents > 2 * GROUP_DOCUMENTS * groups and 2 * groups <= min(self.vbuckets, _GROWTH_MAX * self.groups):
            groups *= 2
        return groups

    def groups_of_table(self, documents: int, *, least: int = 1, each: int | None = None) -> int:
        """Return how many groups a table of this many documents should have: a multiple of `least`, its current number,
        and a divisor of the lake's number, so that groups of both always nest. A group gets at most `each` documents,
        by default `SMALL_GROUP_DOCUMENTS`, unless there are as many groups as the lake has."""
        for groups in range(least, self.groups, least):
            if self.groups % groups == 0 and documents <= groups * (each or SMALL_GROUP_DOCUMENTS):
                return groups
        return max(least, self.groups)

    def to_properties(self) -> dict[str, str]:
        properties = {
            FORMAT_PROPERTY: str(FORMAT_VERSION),
            f"{_PROPERTY}bucket_uuid": self.bucket_uuid,
            f"{_PROPERTY}vbuckets": str(self.vbuckets),
            f"{_PROPERTY}groups": str(self.groups),
            f"{_PROPERTY}xattrs": str(self.xattrs).lower(),
        }
        if self.document is not DocumentForm.STRING:
            properties[DOCUMENT_PROPERTY] = self.document.value
        if self.bucket_name is not None:
            properties[f"{_PROPERTY}bucket_name"] = self.bucket_name
        return properties if self.transform is None else {**properties, f"{_PROPERTY}transform": self.transform}

    @classmethod
    def from_properties(cls, properties: Mapping[str, str | None], *, where: str) -> Self:
        try:
            version = int(properties[FORMAT_PROPERTY] or "")
            if version > FORMAT_VERSION:
                raise LakeTooNew(
                    f"{where} has format {version}, and this program supports formats up to {FORMAT_VERSION}",
                    hint="Use the version of Headwater that created it, or a newer one",
                )
            return cls(
                bucket_uuid=properties[f"{_PROPERTY}bucket_uuid"] or "",
                vbuckets=int(properties[f"{_PROPERTY}vbuckets"] or ""),
                groups=int(properties[f"{_PROPERTY}groups"] or ""),
                xattrs=properties[f"{_PROPERTY}xattrs"] == "true",
                document=DocumentForm(properties.get(DOCUMENT_PROPERTY) or DocumentForm.STRING),
                transform=properties.get(f"{_PROPERTY}transform"),
                bucket_name=properties.get(f"{_PROPERTY}bucket_name"),
            )
        except (KeyError, ValueError) as error:
            raise LakeDamaged(
                f"the table at {where} was not created by Headwater, or its properties were changed",
                hint="Give another directory, or restore the table's log from a backup",
            ) from error


def groups_within(group: int, *, of: int, groups: int) -> range:
    """Return those of `groups` groups that together have the vbuckets of `group` out of `of`; or the one that contains
    it, if there are fewer."""
    first = group * groups // of
    return range(first, max(first + 1, (group + 1) * groups // of))


def groups_for(documents: int) -> int:
    """Return the number of groups for a new lake of this many documents. The caller limits it to the vbuckets."""
    return max(GROUPS_MIN, -(-documents // GROUP_DOCUMENTS))


def table_name(scope: str | None, collection: str | None, collection_id: int) -> str:
    """Return the name of a collection's table. A collection that was dropped before its name was known gets its id,
    under a name that no scope can have."""
    if scope is None or collection is None:
        return f"_unnamed.{collection_id:x}"
    return f"{scope}.{collection}"


FOLDER_BYTES_MAX = 255
"""The maximum of a folder's name on common file systems."""
_DIGEST_CHARS = 32
TABLE_PROPERTY = "headwater.table"
"""The name of a table whose folder has another name."""


def folder_name(table: str) -> str:
    """Return the folder of a table, under each kind. No two tables share one.

    Names consist of letters, digits, `_`, `-` and `%`. A percent sign becomes `~`, because delta-rs reads `%20` in a
    path as a space. A name that is too long for a folder is cut, and its digest appended after `.~`, which no other
    folder contains: no collection's name begins with a percent sign.
    """
    name = table.replace("%", "~")
    if len(name) <= FOLDER_BYTES_MAX:
        return name
    digest = hashlib.sha256(table.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: FOLDER_BYTES_MAX - _DIGEST_CHARS - 2]}.~{digest}"


# --- the columns of the tables ----------------------------------------------------------------------------------------
#
# Delta has no unsigned integers. Numbers that may exceed 63 bits (vbuuids, and by their type seqnos, revisions and CAS)
# keep their 64 bits and are read as signed; 32-bit numbers are widened to 64.
#
# Keys are UTF-8 by Couchbase's rules, but no server enforces them. If a key is not UTF-8, its bytes are in `key_bytes`,
# and `key` shows them with escapes such as `\xff`; `key_bytes` is null for all others. The tables compare keys by their
# bytes, so two keys that look alike are still two documents.

TIME = pa.timestamp("us", tz="UTC")
XATTRS = pa.field("xattrs", pa.map_(pa.string(), pa.binary()))
GROUP = pa.field("vbucket_group", pa.int32(), nullable=False)
FEED_PROPERTY = "delta.enableChangeDataFeed"
FEED_FOLDER = "_change_data"
"""The folder of a change feed's files, as Delta's protocol names it."""
FEED_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp")
"""The additional columns of a change feed, as Delta's protocol names them."""
IS_CURRENT = pa.field("is_current", pa.bool_(), nullable=False)
_KEY = [
    pa.field("key", pa.string()),
    pa.field("key_bytes", pa.binary()),
]
_CHANGE = [
    pa.field("vbucket", pa.int32(), nullable=False),
    pa.field("vbuuid", pa.int64(), nullable=False),
    pa.field("seqno", pa.int64(), nullable=False),
    pa.field("rev", pa.int64(), nullable=False),
    pa.field("op", pa.string(), nullable=False),
    pa.field("scope", pa.string()),
    pa.field("collection", pa.string()),
    pa.field("collection_id", pa.int64()),
    *_KEY,
    pa.field("value", pa.binary()),
    pa.field("datatype", pa.int16(), nullable=False),
    pa.field("flags", pa.int64(), nullable=False),
    pa.field("expiry", pa.int64(), nullable=False),
    pa.field("cas", pa.int64(), nullable=False),
    pa.field("changed_at", TIME),
    pa.field("snapshot_start", pa.int64(), nullable=False),
    pa.field("snapshot_end", pa.int64(), nullable=False),
]
_LANDING = [
    pa.field("batch", pa.int64(), nullable=False),
    pa.field("landed_at", TIME, nullable=False),
    pa.field("void", pa.bool_(), nullable=False),
]
_VERSION = [
    pa.field("datatype", pa.int16(), nullable=False),
    pa.field("flags", pa.int64(), nullable=False),
    pa.field("expiry", pa.int64(), nullable=False),
    pa.field("cas", pa.int64(), nullable=False),
    pa.field("seqno", pa.int64(), nullable=False),
    pa.field("rev", pa.int64(), nullable=False),
    pa.field("vbucket", pa.int32(), nullable=False),
    pa.field("vbuuid", pa.int64(), nullable=False),
    pa.field("collection_id", pa.int64(), nullable=False),
    pa.field("changed_at", TIME),
]
_DOCUMENT = {
    form: [*_KEY, pa.field("document", type_), pa.field("content", pa.binary()), *_VERSION]
    for form, type_ in ((DocumentForm.STRING, pa.string()), (DocumentForm.VARIANT, VARIANT))
}
_VALIDITY = [pa.field("valid_from", TIME), pa.field("valid_to", TIME), pa.field("valid_to_seqno", pa.int64())]
_RANGES = ("key", "changed_at", "seqno", "vbucket")
CHANGE_RANGES = (*_RANGES, "collection_id", "batch", "landed_at")
DOCUMENT_RANGES = _RANGES
HISTORY_RANGES = (*_RANGES, *(field.name for field in _VALIDITY))
"""The columns whose minimum and maximum the log has for each file, so that files can be skipped unread."""
UNMATCHED_OP = "unmatched"
"""A write of a document that does not meet the condition of the landing (`chosen_rows`)."""
DOCUMENT_OPS = (*OPS[:3], UNMATCHED_OP)
"""Changes of documents. Only the first leaves a document."""
LANDED_OPS = (*DOCUMENT_OPS, *OPS[3:])
"""The values of `op` in `changes`."""
NAME_COLUMNS = ("op", "scope", "collection")
NAME_TYPE = pa.dictionary(pa.int32(), pa.string())
"""They have few distinct values, so in memory they are dictionary-encoded."""
NARROW = (*("vbucket", "seqno", "op", "collection_id", "key", "key_bytes", "changed_at", "batch", "landed_at", "void"),)
"""The columns of `changes` that decide which rows make up the documents."""


def changes_schema(*, xattrs: bool) -> pa.Schema:
    """Return the schema of `changes`: one row per change. `batch` numbers the commits of batches, `landed_at` is the
    time of that batch, and `void` marks what a rollback took back."""
    return pa.schema([*_CHANGE, *([XATTRS] if xattrs else []), *_LANDING])


def name_columns(columns: Collection[str]) -> list[str]:
    """Return the columns of a table that hold names. Only `changes` has them: in other tables, a column with such a
    name is a typed column for a field of that name."""
    return [] if "document" in columns else [name for name in NAME_COLUMNS if name in columns]


def documents_schema(
    *, xattrs: bool, form: DocumentForm = DocumentForm.STRING, typed: pa.Schema | None = None
) -> pa.Schema:
    """Return the schema of documents: one row per live document, without the partition columns. `document` has JSON, as
    text or as a variant; `content` has the bytes of any other document."""
    return pa.schema([*_DOCUMENT[form], *([XATTRS] if xattrs else []), *(typed or [])])


def history_schema(
    *, xattrs: bool, form: DocumentForm = DocumentForm.STRING, typed: pa.Schema | None = None
) -> pa.Schema:
    """Return the schema of a history: one row per version, without the partition columns. `valid_to` and
    `valid_to_seqno` are the time and the seqno of the change that ended it. Typed columns with the name of one of these
    are left out."""
    own = {IS_CURRENT.name, *(field.name for field in _VALIDITY)}
    others = [field for field in typed or [] if field.name.lower() not in own]
    return pa.schema([*_DOCUMENT[form], *([XATTRS] if xattrs else []), *_VALIDITY, *others])


def document_ranges(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns of documents that the log has ranges of, including typed columns of simple types."""
    own = {*(field.name for field in _DOCUMENT[DocumentForm.STRING]), XATTRS.name, GROUP.name}
    return (*DOCUMENT_RANGES, *(field.name for field in schema if field.name not in own and has_bounds(field.type)))


def history_ranges(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns of a history that the log has ranges of."""
    typed = [name for name in document_ranges(schema) if name not in HISTORY_RANGES]
    return (*HISTORY_RANGES, *typed)


def has_bounds(type_: pa.DataType) -> bool:
    """Whether a log can have the minimum and maximum of a column of this type."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
    return any(is_kind(type_) for is_kind in kinds)


FIELD = pa.field("field", pa.string())


def rejects_schema(*, with_field: bool, form: DocumentForm = DocumentForm.STRING) -> pa.Schema:
    """Return the schema of rejects: one row per live document that does not fit the typed columns. `field` is the first
    field that does not fit; earlier versions did not record it."""
    reason = pa.field("reason", pa.string(), nullable=False)
    return pa.schema([*_DOCUMENT[form], *([FIELD] if with_field else []), reason])


# --- descriptions of the tables ---------------------------------------------------------------------------------------
#
# Delta keeps a description of each table and a comment for each column in its metadata. Engines show them, and
# catalogs copy them.

FIELD_METADATA = b"headwater.field"
"""On a column: the field that it holds, if that has another name."""
BESIDE_METADATA = b"headwater.beside"
"""On a column: it has those values of its field whose type differs from the columns before it."""
COMMENT = b"comment"
"""On a column: Delta's key for its comment."""
_DESCRIPTIONS = {
    "changes": "Every change that was landed, in the order of its seqno within each vbucket; void marks those that a "
    "rollback took back",
    "documents": "The live documents of {}",
    "history": "All versions of the documents of {}, each with the time that it was valid",
    "rejects": "Live documents of {} with values that the typed columns of documents can't hold",
}
_COMMENTS = {
    "vbucket": "The vbucket of the key",
    "vbuuid": "The branch of the vbucket's history that the change is on",
    "seqno": "The number of the change within its vbucket",
    "rev": "The number of changes of the document",
    "op": "What the change was, such as mutation, deletion, expiration or rollback",
    "scope": "The scope of the collection",
    "collection": "The collection",
    "collection_id": "The number of the collection: one that is made again has another",
    "key": "The key; with escapes where it is not UTF-8",
    "key_bytes": "The bytes of a key that is not UTF-8",
    "value": "The value, as the server has it",
    "document": "The document, if it is JSON",
    "content": "The bytes of a document that is not JSON",
    "datatype": "The protocol's datatype bits: 1 is JSON",
    "flags": "The flags that the writer has set",
    "expiry": "When the document expires, in seconds since 1970; 0 for never",
    "cas": "The CAS value of the version",
    "changed_at": "When the change was made, by the clock of its server",
    "snapshot_start": "The first seqno of the snapshot that the change came in",
    "snapshot_end": "The last seqno of the snapshot that the change came in",
    "batch": "The number of the batch that landed the change",
    "landed_at": "When that batch was landed",
    "void": "Whether a rollback took the change back",
    XATTRS.name: "The extended attributes",
    GROUP.name: "The group of vbuckets that a file of the table has rows of",
    "valid_from": "When the version was written",
    "valid_to": "When the next version was written; null for the current one",
    "valid_to_seqno": "The seqno of the change that ended the version",
    IS_CURRENT.name: "Whether the version is the current one",
    FIELD.name: "The first field that does not fit its column",
    "reason": "Why it does not fit",
}


def table_description(kind: TableKind, collection: str) -> str:
    """Return the description of a table. `changes` belongs to no collection."""
    return _DESCRIPTIONS[kind].format(collection)


def commented(schema: pa.Schema, kind: TableKind) -> pa.Schema:
    """Return a schema with comments on all columns that lack one. Columns other than our own are typed columns."""
    own = [*_CHANGE, *_LANDING] if kind is TableKind.CHANGES else _DOCUMENT[DocumentForm.STRING]
    validity = _VALIDITY if kind is TableKind.HISTORY else []
    rejected = rejects_schema(with_field=True) if kind is TableKind.REJECTS else []
    names = {it.name for it in (*own, XATTRS, GROUP, IS_CURRENT, *validity, *rejected)}

    def with_comment(field: pa.Field) -> pa.Field:
        metadata = field.metadata or {}
        of_field = metadata.get(FIELD_METADATA, field.name.encode()).decode()
        values = "The values of another type of the" if BESIDE_METADATA in metadata else "The"
        comment = _COMMENTS[field.name] if field.name in names else f"{values} field {of_field!r} of the document"
        return field.with_metadata({COMMENT: comment, **metadata})

    return pa.schema([with_comment(field) for field in schema])


# --- from the batches of a reader, or of Spark, to the columns of `changes` -------------------------------------------


def to_change_columns(batch: pa.RecordBatch, schema: pa.Schema) -> dict[str, pa.Array]:
    """Return the columns of a batch, in the types of the table. Names become dictionaries."""
    keys, key_bytes = split_keys(_key_bytes(batch))
    columns = {"key": keys, "key_bytes": key_bytes}
    for field in schema:
        if field.name in NAME_COLUMNS:
            columns[field.name] = _as_dictionary(batch.column(field.name))
        elif field.name in batch.schema.names and field.name not in columns:
            columns[field.name] = _as_type(batch.column(field.name), field.type)
    return columns


def _key_bytes(batch: pa.RecordBatch) -> pa.Array:
    """Return the keys as bytes. Spark's source gives texts, and the bytes of keys that are not UTF-8 beside them."""
    keys = _as_type(batch.column("key"), pa.binary())
    return keys if "key_bytes" not in batch.schema.names else raw_keys(batch.column("key"), batch.column("key_bytes"))


def _as_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if column.type == wanted:
        return column
    if pa.types.is_uint64(column.type) and pa.types.is_int64(wanted):
        return column.view(wanted)
    return column.cast(wanted)


def _as_dictionary(column: pa.Array) -> pa.Array:
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    return column if column.type == NAME_TYPE else column.cast(NAME_TYPE)


def raw_keys(key: Any, key_bytes: Any) -> Any:
    """Return the bytes of keys, the inverse of `split_keys`. Takes arrays or chunked arrays."""
    plain = key.cast(pa.binary())
    return plain if key_bytes.null_count == len(key_bytes) else pc.coalesce(key_bytes, plain)


# --- from rows of `changes` to rows of the tables of documents --------------------------------------------------------


_Array = Any
"""An Arrow array, chunked or not."""
_NOTHING = pa.scalar(None, pa.binary())


def document_columns(changes: pa.Table, schema: pa.Schema) -> dict[str, _Array]:
    """Return the columns of a table of documents that mutations fill, by name; `schema` may have more."""
    has_variants = pa.types.is_struct(schema.field("document").type)
    split = split_variants if has_variants else split_values
    documents, contents = split(changes.column("value"), np.asarray(changes.column("datatype").to_numpy()))
    columns = {"document": documents, "content": contents}
    for name in schema.names:
        if name in changes.schema.names and name not in columns:
            columns[name] = changes.column(name)
    return columns


def split_values(values: pa.ChunkedArray, datatypes: NDArray[np.int16]) -> tuple[_Array, _Array]:
    """Return the texts of those values that are JSON, and the bytes of all others.

    A value that claims to be JSON but is not UTF-8 goes with the others.
    """
    is_json = (datatypes & Datatype.JSON) != 0
    if is_json.all():
        return split_texts(values)
    texts, _ = split_texts(pc.if_else(pa.array(is_json), values, _NOTHING))
    return texts, pc.if_else(pc.is_valid(texts), _NOTHING, values)


def split_variants(values: _Array, datatypes: NDArray[np.int16]) -> tuple[_Array, _Array]:
    """Return those JSON values that can be variants as such, and the bytes of all others."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    is_json = (datatypes & Datatype.JSON) != 0
    if is_json.all():
        return to_variants(values)
    variants, _ = to_variants(pc.if_else(pa.array(is_json), values, _NOTHING))
    return variants, pc.if_else(pc.is_valid(variants), _NOTHING, values)


def split_texts(values: _Array) -> tuple[_Array, _Array]:
    """Return values as text, and the bytes of those that are not UTF-8."""
    try:
        return values.cast(pa.string()), pa.nulls(len(values), pa.binary())
    except pa.ArrowInvalid:
        texts = pa.array([_text_or_none(value) for value in values.to_pylist()], pa.string())
        return texts, pc.if_else(pc.is_valid(texts), _NOTHING, values)


def _text_or_none(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
