"""Couchbase's names for what a user may do: those that the node has rights for, read and written.

A role is written `admin`, `data_reader[travel]` or `data_reader[*]`, several of them with commas in between.
Couchbase's data roles may also name a scope and a collection, `data_reader[travel:inventory:hotels]`; here rights are
those of whole buckets, so that these two can be nothing but `*`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

from headwater.errors import LocalProtocolError
from headwater.node.auth.users import ALL_BUCKETS, Grant, Role

_ROLE = re.compile(r"(?P<name>\w+)(?:\[(?P<parameters>[^\[\]]+)\])?")
_ROLE_CHARS_SHOWN = 64
_BUCKET = ("bucket_name",)
_COLLECTION = ("bucket_name", "scope_name", "collection_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRole:
    """A role of Couchbase's that the node has, too."""

    role: Role
    title: str
    description: str
    parameters: tuple[str, ...] = ()
    """What it is a role on; nothing for the whole node."""

    @property
    def name(self) -> str:
        return self.role.value

    def __str__(self) -> str:
        return f"{self.name}[BUCKET]" if self.parameters else self.name


KNOWN_ROLES = (
    KnownRole(role=Role.ADMIN, title="Full Admin", description="May do everything, and make users."),
    KnownRole(
        role=Role.BUCKET_ADMIN,
        title="Bucket Admin",
        description="May manage the bucket and its collections, and read no documents.",
        parameters=_BUCKET,
    ),
    KnownRole(
        role=Role.BUCKET_FULL_ACCESS,
        title="Application Access",
        description="May read and write documents, and stream changes.",
        parameters=_BUCKET,
    ),
    KnownRole(
        role=Role.DATA_READER,
        title="Data Reader",
        description="May read documents by their keys.",
        parameters=_COLLECTION,
    ),
    KnownRole(
        role=Role.DATA_WRITER,
        title="Data Writer",
        description="May write whole documents, and read none.",
        parameters=_COLLECTION,
    ),
    KnownRole(
        role=Role.DATA_DCP_READER,
        title="Data DCP Reader",
        description="May read documents, and stream changes.",
        parameters=_COLLECTION,
    ),
)

_BY_NAME = {known.name: known for known in KNOWN_ROLES}

_AS_COUCHBASE_HAS_IT: dict[Role, tuple[Role, ...]] = {
    Role.READER: (Role.DATA_READER, Role.DATA_DCP_READER),
    Role.WRITER: (Role.DATA_READER, Role.DATA_DCP_READER, Role.DATA_WRITER),
    Role.ADMIN: (Role.BUCKET_ADMIN, Role.DATA_READER, Role.DATA_DCP_READER, Role.DATA_WRITER),
}
"""The node's own roles, which Couchbase has other names for; the last one where it is not of the whole node."""


# --- reading ------------------------------------------------------------------------------------------------------


def parse_roles(text: str, *, buckets: Container[str]) -> frozenset[Grant]:
    """The grants that the roles stand for. `buckets` are those that a role may name."""
    written = [role.strip() for role in text.split(",") if role.strip()]
    parsed = {role: _parse_role(role, buckets) for role in written}
    bad = [role[:_ROLE_CHARS_SHOWN] for role, grant in parsed.items() if grant is None]
    if bad:
        raise LocalProtocolError(
            f"not a role of this node, or not on a bucket that is here: {', '.join(bad)}",
            hint=f"The roles are {', '.join(str(known) for known in KNOWN_ROLES)}; [*] is all buckets",
        )
    return frozenset(grant for grant in parsed.values() if grant is not None)


def _parse_role(written: str, buckets: Container[str]) -> Grant | None:
    match = _ROLE.fullmatch(written)
    known = _BY_NAME.get(match["name"].lower()) if match is not None else None
    if match is None or known is None:
        return None
    if not known.parameters:
        return Grant(known.role) if match["parameters"] is None else None
    bucket, *parts = (match["parameters"] or "").split(":")
    if len(parts) >= len(known.parameters) or any(part != ALL_BUCKETS for part in parts):
        return None
    return Grant(known.role, bucket) if bucket == ALL_BUCKETS or bucket in buckets else None


# --- writing ------------------------------------------------------------------------------------------------------


def roles_of(grants: Iterable[Grant]) -> list[dict[str, str]]:
    """The grants as Couchbase's REST interface tells of roles."""
    named = {known for grant in grants for known in _named(grant)}
    return [describe_role(_BY_NAME[role], bucket) for role, bucket in sorted(named)]


def _named(grant: Grant) -> list[tuple[Role, str]]:
    if grant == Grant(Role.ADMIN):
        return [(Role.ADMIN, ALL_BUCKETS)]
    return [(role, grant.bucket) for role in _AS_COUCHBASE_HAS_IT.get(grant.role, (grant.role,))]


def describe_role(known: KnownRole, bucket: str) -> dict[str, str]:
    of = (bucket, ALL_BUCKETS, ALL_BUCKETS)
    return {"role": known.name, **dict(zip(known.parameters, of, strict=False))}
