"""Users and groups: their names, credentials and rights on buckets; and Couchbase's names for roles.

`Users` is an immutable value in which the whole node looks up rights; `accounts` changes and stores it. It has no
passwords: for each SCRAM mechanism a user has a salt and two keys derived from the password, and PLAIN is checked
against those of SCRAM-SHA512. Callers pass salts as arguments, because this module draws no randomness.

Whether a user exists stays secret: for an unknown name there are decoy credentials (`headwater.protocol.sasl`). So all
users of a collection, including the decoys, have the same number of iterations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from headwater.errors import LocalProtocolError
from headwater.protocol import sasl
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import DEFAULT_SCOPE

USERS_MAX = 10_000
GROUPS_MAX = 1_000
GRANTS_PER_USER_MAX = 1_000
"""Also the limit of a group."""
GROUPS_PER_USER_MAX = 100
PASSWORD_BYTES_MAX = 1_024
DISPLAY_NAME_CHARS_MAX = 128
DESCRIPTION_CHARS_MAX = 256
REMOVED_MAX = 10_000
"""How many removed users and groups are remembered, so that a node that was away does not restore them."""
DECOY_SECRET_BYTES = 32

SALTS_BYTES = sasl.SCRAM_SALT_BYTES * len(sasl.SCRAM_MECHANISMS)
"""The random bytes that a new password needs: a salt for each mechanism."""

ALL_BUCKETS = "*"
ALL = "*"
"""All scopes of a bucket, or all collections of a scope."""


class Action(Enum):
    """What a right allows."""

    USE = auto()
    """Select the bucket, and see its config and its collections."""
    READ = auto()
    WRITE = auto()
    STREAM = auto()
    ADMIN = auto()
    """Manage the bucket."""
    SECURITY = auto()
    """Manage the users of the node, create and drop its buckets, and decide which nodes are in a cluster with it. This
    is a right on the whole node, whichever bucket is asked about."""
    NODE = auto()
    """Act as a node of the bucket's cluster: set states of vbuckets, use reserved connection names, read the log-in."""


class Role(StrEnum):
    """A role. The first three are Headwater's own, the others have the names of Couchbase."""

    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"
    BUCKET_ADMIN = "bucket_admin"
    BUCKET_FULL_ACCESS = "bucket_full_access"
    DATA_READER = "data_reader"
    DATA_WRITER = "data_writer"
    DATA_DCP_READER = "data_dcp_reader"
    RO_ADMIN = "ro_admin"
    QUERY_SELECT = "query_select"
    QUERY_INSERT = "query_insert"
    QUERY_UPDATE = "query_update"
    QUERY_DELETE = "query_delete"
    QUERY_MANAGE_INDEX = "query_manage_index"
    QUERY_SYSTEM_CATALOG = "query_system_catalog"
    FTS_SEARCHER = "fts_searcher"
    FTS_ADMIN = "fts_admin"
    ANALYTICS_READER = "analytics_reader"
    VIEWS_READER = "views_reader"
    VIEWS_ADMIN = "views_admin"

    @property
    def is_of_another_service(self) -> bool:
        """Whether the role is for a service that the node does not have: it is stored, but allows nothing."""
        return self.startswith(("query_", "fts_", "analytics_", "views_"))


ROLE_ACTIONS: dict[Role, frozenset[Action]] = {
    Role.READER: frozenset({Action.USE, Action.READ, Action.STREAM}),
    Role.WRITER: frozenset({Action.USE, Action.READ, Action.STREAM, Action.WRITE}),
    Role.ADMIN: frozenset(Action),
    Role.BUCKET_ADMIN: frozenset({Action.USE, Action.ADMIN}),
    Role.BUCKET_FULL_ACCESS: frozenset({Action.USE, Action.READ, Action.STREAM, Action.WRITE}),
    Role.DATA_READER: frozenset({Action.USE, Action.READ}),
    Role.DATA_WRITER: frozenset({Action.USE, Action.WRITE}),
    Role.DATA_DCP_READER: frozenset({Action.USE, Action.READ, Action.STREAM}),
    Role.RO_ADMIN: frozenset({Action.USE}),
    **dict.fromkeys((role for role in Role if role.is_of_another_service), frozenset()),
}


@dataclass(frozen=True, slots=True)
class Grant:
    """A role on all buckets, or on one bucket, scope or collection."""

    role: Role
    bucket: str = ALL_BUCKETS
    scope: str = ALL
    collection: str = ALL

    def allows(
        self, action: Action, bucket: str | None, scope: str | None = None, collection: str | None = None
    ) -> bool:
        """Whether the grant allows an action. `bucket` is None for the whole node, which needs a grant on all buckets.

        `scope` and `collection` are None for the whole bucket. To use a bucket (`Action.USE`), a grant on one of its
        scopes or collections is enough.
        """
        concerned = None if action is Action.SECURITY else bucket
        if action not in ROLE_ACTIONS[self.role] or self.bucket not in (ALL_BUCKETS, concerned):
            return False
        return action is Action.USE or self.covers(scope, collection)

    def covers(self, scope: str | None, collection: str | None) -> bool:
        """Whether the grant covers this collection of its bucket, or with None all of them."""
        return self.scope in (ALL, scope) and self.collection in (ALL, collection)

    def __str__(self) -> str:
        names = [self.bucket, *(name for name in (self.scope, self.collection) if name != ALL)]
        return f"{self.role}[{':'.join(names)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user with its grants, and its credentials for every SCRAM mechanism."""

    name: str
    grants: frozenset[Grant]
    """The user's own grants, in addition to those of its groups (`Users.grants_of`)."""
    credentials: Mapping[sasl.Mechanism, sasl.ScramCredentials] = field(repr=False)
    display_name: str = ""
    """A name for people only. It has no effect on rights."""
    groups: frozenset[str] = frozenset()
    changed_ms: int = 0
    """When the user was last changed. If two nodes have different versions, the later one wins (`auth.accounts`)."""
    password_changed_ms: int = 0
    """When its password was last changed."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_display_name(self.display_name)
        _check_grants(self.grants)
        if self.credentials.keys() != frozenset(sasl.SCRAM_MECHANISMS):
            raise LocalProtocolError(f"user {self.name!r} needs credentials for {', '.join(sasl.SCRAM_MECHANISMS)}")
        if len(self.groups) > GROUPS_PER_USER_MAX:
            raise LocalProtocolError(f"a user is in at most {GROUPS_PER_USER_MAX} groups", hint="Join some of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Grants that all users of the group have."""

    name: str
    grants: frozenset[Grant] = frozenset()
    description: str = ""
    changed_ms: int = 0

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_grants(self.grants)
        if len(self.description) > DESCRIPTION_CHARS_MAX or not self.description.isprintable():
            raise LocalProtocolError(
                f"{self.description[:DESCRIPTION_CHARS_MAX]!r} cannot describe a group",
                hint=f"A description has up to {DESCRIPTION_CHARS_MAX} printable characters",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """All users and groups of a node. A collection is immutable: `add`, `put` and `remove` return another one.

    So the stored collection and the one in force can differ: store a new one first, then put it in force.
    """

    decoy_secret: bytes = field(repr=False)
    iterations: int = sasl.SCRAM_ITERATIONS
    by_name: Mapping[str, User] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)

    # State that the nodes of a cluster use to share the same users (`auth.accounts`).
    removed: Mapping[str, int] = field(default_factory=dict)
    """When users and groups were removed, in milliseconds, by `user NAME` or `group NAME`."""
    sharing: str = ""
    """A random id of the users that the nodes of a cluster share; empty if they were never shared."""
    clusters: frozenset[str] = frozenset()
    """The uuids of the clusters in which they are shared."""
    _granted: Mapping[str, frozenset[Grant]] = field(init=False, repr=False, compare=False)
    """All grants of each user in a group, computed once because rights are looked up with every request."""

    def __post_init__(self) -> None:
        if len(self.decoy_secret) != DECOY_SECRET_BYTES:
            raise LocalProtocolError(f"the decoy secret has {DECOY_SECRET_BYTES} bytes, drawn once for a node")
        if not sasl.SCRAM_ITERATIONS_MIN <= self.iterations <= sasl.SCRAM_ITERATIONS_MAX:
            raise LocalProtocolError(
                f"passwords are hashed with {sasl.SCRAM_ITERATIONS_MIN} to {sasl.SCRAM_ITERATIONS_MAX} iterations",
                hint="Use a number in this range: clients reject fewer as too weak, and more as too slow",
            )
        if len(self.by_name) > USERS_MAX:
            raise LocalProtocolError(f"a node has at most {USERS_MAX} users", hint="Remove one first")
        if len(self.groups) > GROUPS_MAX:
            raise LocalProtocolError(f"a node has at most {GROUPS_MAX} groups", hint="Remove one first")
        granted = {
            user.name: user.grants.union(*(self.groups[name].grants for name in user.groups if name in self.groups))
            for user in self.by_name.values()
            if user.groups
        }
        object.__setattr__(self, "_granted", granted)

    # --- changes --------------------------------------------------------------------------------------------------

    def new_user(self, name: str, password: str, grants: Iterable[Grant], *, salts: bytes) -> User:
        """Create a user to add to this collection. Takes tens of milliseconds, by design."""
        return User(
            name=name,
            grants=frozenset(grants),
            credentials=hash_password(password, salts=salts, iterations=self.iterations),
        )

    def add(self, user: User) -> Users:
        """The collection with one more user. Raises `LocalProtocolError` if the user exists."""
        if user.name in self.by_name:
            raise LocalProtocolError(f"user {user.name!r} already exists", hint="Remove it first, or use another name")
        return self.put(user)

    def put(self, user: User) -> Users:
        """The collection with this user, which replaces one of the same name."""
        if any(credentials.iterations != self.iterations for credentials in user.credentials.values()):
            raise LocalProtocolError(
                f"the password of {user.name!r} was not hashed with {self.iterations} iterations",
                hint="Create the user with new_user of this collection: another number would reveal that the user "
                "exists",
            )
        return replace(self, by_name={**self.by_name, user.name: user})

    def remove(self, name: str) -> Users:
        """The collection without this user."""
        if name not in self.by_name:
            raise LocalProtocolError(f"there is no user {name!r}", hint="Check the name, which is case-sensitive")
        return replace(self, by_name={other: user for other, user in self.by_name.items() if other != name})

    def put_group(self, group: Group) -> Users:
        """The collection with this group, which replaces one of the same name."""
        return replace(self, groups={**self.groups, group.name: group})

    def remove_group(self, name: str) -> Users:
        """The collection without this group. Its users lose the grants of the group."""
        groups = {other: group for other, group in self.groups.items() if other != name}
        left = {
            user.name: replace(user, groups=user.groups - {name})
            for user in self.by_name.values()
            if name in user.groups
        }
        return replace(self, groups=groups, by_name={**self.by_name, **left})

    def stamped(self, before: Users, *, now_ms: int) -> Users:
        """The collection with the current time on all entries that differ from `before`. It is later than all known
        changes: a clock that lags behind those of other nodes must not make a change look older than what it replaces.
        """
        known = [user.changed_ms for user in before.by_name.values()]
        known += [group.changed_ms for group in before.groups.values()]
        at_ms = max(now_ms, 1 + max((*known, *before.removed.values()), default=0))
        gone = {f"user {name}": at_ms for name in before.by_name.keys() - self.by_name.keys()}
        gone |= {f"group {name}": at_ms for name in before.groups.keys() - self.groups.keys()}
        here = {f"user {name}" for name in self.by_name} | {f"group {name}" for name in self.groups}
        removed = {entry: ms for entry, ms in {**self.removed, **gone}.items() if entry not in here}
        return replace(
            self,
            by_name={
                name: user if user == before.by_name.get(name) else _stamped(user, before.by_name.get(name), at_ms)
                for name, user in self.by_name.items()
            },
            groups={
                name: group if group == before.groups.get(name) else replace(group, changed_ms=at_ms)
                for name, group in self.groups.items()
            },
            removed=newest_removed(removed),
        )

    # --- queries --------------------------------------------------------------------------------------------------

    def credentials(self, mechanism: sasl.Mechanism, name: str) -> sasl.ScramCredentials:
        """The user's credentials for a `ScramServer`, or decoys if there is no such user."""
        # Derive decoys in both cases: otherwise the time that they take would reveal that the user does not exist.
        decoys = sasl.decoy_credentials(mechanism, name, secret=self.decoy_secret, iterations=self.iterations)
        user = self.by_name.get(name)
        return decoys if user is None else user.credentials[mechanism]

    def check_password(self, name: str, password: str) -> bool:
        """Whether the user exists and has this password. Takes about ten milliseconds in both cases, by design."""
        credentials = self.credentials(sasl.Mechanism.SCRAM_SHA512, name)
        return sasl.password_matches(sasl.Mechanism.SCRAM_SHA512, password, credentials)

    @property
    def has_admin(self) -> bool:
        """Whether any user may manage users. Without one, none could ever be made an admin."""
        return any(self.is_admin(name) for name in self.by_name)

    def is_admin(self, name: str) -> bool:
        """Whether a user may manage users and buckets of the whole node."""
        return self.may(name, Action.SECURITY, None)

    def grants_of(self, name: str) -> frozenset[Grant]:
        """All grants of a user, its own and those of its groups; none if there is no such user."""
        user = self.by_name.get(name)
        return frozenset() if user is None else self._granted.get(name, user.grants)

    def may(
        self, name: str, action: Action, bucket: str | None, *, scope: str | None = None, collection: str | None = None
    ) -> bool:
        """Whether the user may do this on a bucket, on a collection of it, or with None as `bucket` on the node."""
        return any(grant.allows(action, bucket, scope, collection) for grant in self.grants_of(name))

    def visible(self, name: str, bucket: str, manifest: Manifest) -> Manifest:
        """The part of a bucket's manifest that the user has grants for: like kv_engine, this hides all others."""
        grants = [grant for grant in self.grants_of(name) if grant.allows(Action.USE, bucket)]
        if any(grant.scope == ALL for grant in grants):
            return manifest
        scopes = []
        for scope in manifest.scopes:
            seen = [one for one in scope.collections if any(grant.covers(scope.name, one.name) for grant in grants)]
            if seen or scope.id == DEFAULT_SCOPE:  # Every manifest has the default scope.
                scopes.append(replace(scope, collections=tuple(seen)))
        return replace(manifest, scopes=tuple(scopes))


def _stamped(user: User, before: User | None, at_ms: int) -> User:
    is_same_password = before is not None and before.credentials == user.credentials
    return replace(user, changed_ms=at_ms, password_changed_ms=user.password_changed_ms if is_same_password else at_ms)


def newest_removed(removed: Mapping[str, int]) -> dict[str, int]:
    """The newest removals, at most `REMOVED_MAX`."""
    return dict(sorted(removed.items(), key=lambda entry: (entry[1], entry[0]))[-REMOVED_MAX:])


def hash_password(password: str, *, salts: bytes, iterations: int) -> dict[sasl.Mechanism, sasl.ScramCredentials]:
    """Derive the credentials of a password for every mechanism, each with its own salt."""
    if "\0" in password or not 0 < len(password.encode(errors="replace")) <= PASSWORD_BYTES_MAX:
        raise LocalProtocolError(f"a password has 1 to {PASSWORD_BYTES_MAX} bytes, none of them NUL")
    if len(salts) != SALTS_BYTES:
        raise LocalProtocolError(f"a password needs {SALTS_BYTES} random bytes as salts")
    return {
        mechanism: sasl.derive_credentials(
            mechanism,
            password,
            salt=salts[index * sasl.SCRAM_SALT_BYTES : (index + 1) * sasl.SCRAM_SALT_BYTES],
            iterations=iterations,
        )
        for index, mechanism in enumerate(sasl.SCRAM_MECHANISMS)
    }


def _check_name(name: str) -> None:
    # HTTP's basic authentication ends a name at the first colon. Characters that are not UTF-8 are not printable.
    if not 0 < len(name) <= sasl.USER_CHARS_MAX or ":" in name or not name.isprintable():
        raise LocalProtocolError(
            f"{name[: sasl.USER_CHARS_MAX]!r} cannot be a user name",
            hint=f"A name has 1 to {sasl.USER_CHARS_MAX} printable characters and no colon",
        )


def _check_display_name(name: str) -> None:
    if len(name) > DISPLAY_NAME_CHARS_MAX or not name.isprintable():
        raise LocalProtocolError(
            f"{name[:DISPLAY_NAME_CHARS_MAX]!r} cannot be the full name of a user",
            hint=f"It has up to {DISPLAY_NAME_CHARS_MAX} printable characters",
        )


def _check_grants(grants: frozenset[Grant]) -> None:
    if len(grants) > GRANTS_PER_USER_MAX:
        raise LocalProtocolError(f"a user has at most {GRANTS_PER_USER_MAX} grants", hint="Grant on all buckets with *")
    if not all(grant.bucket and grant.scope and grant.collection for grant in grants):
        raise LocalProtocolError("a grant needs the name of a bucket", hint="Grant on all buckets with *")


# --- Couchbase's names for roles ----------------------------------------------------------------------------------

# A role is written `admin`, `data_reader[travel]` or `data_reader[*]`, and several roles are separated by commas. Data
# roles may also name a scope and a collection, `data_reader[travel:inventory:hotels]`. The role for reading streams
# applies to whole buckets only, as streams do here.

_ROLE = re.compile(r"(?P<name>\w+)(?:\[(?P<parameters>[^\[\]]+)\])?")
_ROLE_CHARS_SHOWN = 64
_BUCKET = ("bucket_name",)
_COLLECTION = ("bucket_name", "scope_name", "collection_name")
_OF_WHOLE_BUCKETS = frozenset({Role.DATA_DCP_READER})


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRole:
    """A role of Couchbase that the node supports."""

    role: Role
    title: str
    description: str
    parameters: tuple[str, ...] = ()
    """The parameters of the role: a bucket, or also a scope and a collection; empty for the whole node."""

    @property
    def name(self) -> str:
        return self.role.value

    def __str__(self) -> str:
        return f"{self.name}[BUCKET]" if self.parameters else self.name


KNOWN_ROLES = (
    KnownRole(
        role=Role.ADMIN,
        title="Full Admin",
        # The Python SDK's own tests match these words.
        description="May use all cluster features and the web console, read and write all data, and make users.",
    ),
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
    KnownRole(role=Role.RO_ADMIN, title="Read-Only Admin", description="May see which buckets and nodes there are."),
    *(
        KnownRole(role=role, title=title, description="Of a service that this node does not have.", parameters=on)
        for role, title, on in (
            (Role.QUERY_SELECT, "Query Select", _COLLECTION),
            (Role.QUERY_INSERT, "Query Insert", _COLLECTION),
            (Role.QUERY_UPDATE, "Query Update", _COLLECTION),
            (Role.QUERY_DELETE, "Query Delete", _COLLECTION),
            (Role.QUERY_MANAGE_INDEX, "Query Manage Index", _COLLECTION),
            (Role.QUERY_SYSTEM_CATALOG, "Query System Catalog", ()),
            (Role.FTS_SEARCHER, "Search Reader", _COLLECTION),
            (Role.FTS_ADMIN, "Search Admin", _BUCKET),
            (Role.ANALYTICS_READER, "Analytics Reader", ()),
            (Role.VIEWS_READER, "Views Reader", _BUCKET),
            (Role.VIEWS_ADMIN, "Views Admin", _BUCKET),
        )
    ),
)

_BY_NAME = {known.name: known for known in KNOWN_ROLES}

_AS_COUCHBASE_HAS_IT: dict[Role, tuple[Role, ...]] = {
    Role.READER: (Role.DATA_READER, Role.DATA_DCP_READER),
    Role.WRITER: (Role.DATA_READER, Role.DATA_DCP_READER, Role.DATA_WRITER),
    Role.ADMIN: (Role.BUCKET_ADMIN, Role.DATA_READER, Role.DATA_DCP_READER, Role.DATA_WRITER),
}
"""Headwater's own roles as roles of Couchbase. `ADMIN` is translated only if it is not for the whole node."""


def parse_roles(text: str, *, is_there: Callable[[Grant], bool]) -> frozenset[Grant]:
    """Parse roles into grants. `is_there` returns whether the bucket, scope and collection of a grant exist. Raises
    `LocalProtocolError` for an unknown role, or one on a bucket that does not exist."""
    written = [role.strip() for role in text.split(",") if role.strip()]
    parsed = {role: _parse_role(role, is_there) for role in written}
    bad = [role[:_ROLE_CHARS_SHOWN] for role, grant in parsed.items() if grant is None]
    if bad:
        raise LocalProtocolError(
            f"unknown role, or a role on a bucket that does not exist: {', '.join(bad)}",
            hint=f"The roles are {', '.join(str(known) for known in KNOWN_ROLES)}; [*] means all buckets",
        )
    return frozenset(grant for grant in parsed.values() if grant is not None)


def _parse_role(written: str, is_there: Callable[[Grant], bool]) -> Grant | None:
    match = _ROLE.fullmatch(written)
    known = _BY_NAME.get(match["name"].lower()) if match is not None else None
    if match is None or known is None:
        return None
    if not known.parameters:
        return Grant(known.role) if match["parameters"] is None else None
    names = (match["parameters"] or "").split(":")
    if not all(names) or len(names) > len(known.parameters):
        return None
    grant = Grant(known.role, *names)
    first_all = names.index(ALL) if ALL in names else len(names)
    if any(name != ALL for name in names[first_all:]) or (known.role in _OF_WHOLE_BUCKETS and grant.scope != ALL):
        return None
    return grant if grant.bucket == ALL_BUCKETS or is_there(grant) else None


def roles_of(grants: Iterable[Grant]) -> list[dict[str, str]]:
    """The grants as roles in the form of Couchbase's REST interface."""
    named = {known for grant in grants for known in _named(grant)}
    return [describe_role(_BY_NAME[role], *on) for role, *on in sorted(named)]


def _named(grant: Grant) -> list[tuple[Role, str, str, str]]:
    roles = (Role.ADMIN,) if grant == Grant(Role.ADMIN) else _AS_COUCHBASE_HAS_IT.get(grant.role, (grant.role,))
    return [(role, grant.bucket, grant.scope, grant.collection) for role in roles]


def describe_role(known: KnownRole, bucket: str, scope: str = ALL, collection: str = ALL) -> dict[str, str]:
    return {"role": known.name, **dict(zip(known.parameters, (bucket, scope, collection), strict=False))}
