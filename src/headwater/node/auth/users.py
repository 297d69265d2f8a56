"""Users and their groups: who they are, how they prove it, what they may do on which bucket; Couchbase's role names.

`Users` is a value that the whole node looks rights up in; `accounts` changes and keeps it. It has no
password: for each SCRAM mechanism a user has a salt and two keys that were made from the password, and PLAIN is checked
against those of SCRAM-SHA512. Salts come in as arguments, because randomness is drawn at the edge.

Whether a user exists stays a secret: one that does not has decoys instead (`headwater.protocol.sasl`), which is why
all users of a collection, the decoys included, have the same number of iterations.
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
"""Of a group as well."""
GROUPS_PER_USER_MAX = 100
PASSWORD_BYTES_MAX = 1_024
DISPLAY_NAME_CHARS_MAX = 128
DESCRIPTION_CHARS_MAX = 256
REMOVED_MAX = 10_000
"""Removed users and groups that are remembered, so that a node which was away does not bring them back."""
DECOY_SECRET_BYTES = 32

SALTS_BYTES = sasl.SCRAM_SALT_BYTES * len(sasl.SCRAM_MECHANISMS)
"""Random bytes that a new password needs: a salt for each mechanism."""

ALL_BUCKETS = "*"
ALL = "*"
"""Of a bucket's scopes, or of a scope's collections."""


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
    """Manage the users of the node, make and drop its buckets, and decide which nodes are in a cluster with it. It is a
    right on the whole node, whichever bucket is asked about."""
    NODE = auto()
    """Act as a node of the bucket's cluster: set states of vbuckets, take names of connections, learn the log-in."""


class Role(StrEnum):
    """The first three are the node's own, the others are named as in Couchbase."""

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
        """Whether it is one of a service that the node does not have: it is kept, and allows nothing."""
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
    """A role on one bucket or on all of them, on a scope or on a collection."""

    role: Role
    bucket: str = ALL_BUCKETS
    scope: str = ALL
    collection: str = ALL

    def allows(
        self, action: Action, bucket: str | None, scope: str | None = None, collection: str | None = None
    ) -> bool:
        """`bucket` is None for what concerns the whole node: a grant on all buckets is needed for that.

        `scope` and `collection` are None for what concerns the whole bucket. A grant on less than that is enough to use
        the bucket, as its collections are in it.
        """
        concerned = None if action is Action.SECURITY else bucket
        if action not in ROLE_ACTIONS[self.role] or self.bucket not in (ALL_BUCKETS, concerned):
            return False
        return action is Action.USE or self.covers(scope, collection)

    def covers(self, scope: str | None, collection: str | None) -> bool:
        """Whether the grant is on this collection of its bucket, or for None on all of them."""
        return self.scope in (ALL, scope) and self.collection in (ALL, collection)

    def __str__(self) -> str:
        names = [self.bucket, *(name for name in (self.scope, self.collection) if name != ALL)]
        return f"{self.role}[{':'.join(names)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user with its grants, and with its credentials for every SCRAM mechanism."""

    name: str
    grants: frozenset[Grant]
    """Its own; those of its groups come on top (`Users.grants_of`)."""
    credentials: Mapping[sasl.Mechanism, sasl.ScramCredentials] = field(repr=False)
    display_name: str = ""
    """What people call it; nothing is decided by it."""
    groups: frozenset[str] = frozenset()
    changed_ms: int = 0
    """When it was last changed. Of two nodes' versions the later one counts (`auth.accounts`)."""
    password_changed_ms: int = 0
    """When it got its password."""

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
    """All users and groups of a node. A collection is a value: `add`, `put` and `remove` give another one.

    So what is stored and what is in force can differ: store the new collection first, then put it in force.
    """

    decoy_secret: bytes = field(repr=False)
    iterations: int = sasl.SCRAM_ITERATIONS
    by_name: Mapping[str, User] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)

    # What nodes of a cluster need to have the same users (`auth.accounts`).
    removed: Mapping[str, int] = field(default_factory=dict)
    """When users and groups were removed, in milliseconds, by `user NAME` or `group NAME`."""
    sharing: str = ""
    """Drawn once for the users that the nodes of a cluster have in common; empty where no other node has them."""
    clusters: frozenset[str] = frozenset()
    """The uuids of the clusters in which they are shared."""
    _granted: Mapping[str, frozenset[Grant]] = field(init=False, repr=False, compare=False)
    """All grants of those who are in a group: rights are looked up with every request."""

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
        """A user for this collection, to be added. Takes tens of milliseconds, by design."""
        return User(
            name=name,
            grants=frozenset(grants),
            credentials=hash_password(password, salts=salts, iterations=self.iterations),
        )

    def add(self, user: User) -> Users:
        """The collection with one more user."""
        if user.name in self.by_name:
            raise LocalProtocolError(f"user {user.name!r} already exists", hint="Remove it first, or use another name")
        return self.put(user)

    def put(self, user: User) -> Users:
        """The collection with this user, in place of the one of that name if there is one."""
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
        """The collection with this group, in place of the one of that name if there is one."""
        return replace(self, groups={**self.groups, group.name: group})

    def remove_group(self, name: str) -> Users:
        """The collection without this group. Its users lose what they had by it."""
        groups = {other: group for other, group in self.groups.items() if other != name}
        left = {
            user.name: replace(user, groups=user.groups - {name})
            for user in self.by_name.values()
            if name in user.groups
        }
        return replace(self, groups=groups, by_name={**self.by_name, **left})

    def stamped(self, before: Users, *, now_ms: int) -> Users:
        """The collection with what differs from `before` marked as changed now, which is later than any change known.

        A clock that is behind those of other nodes must not make a change look older than what it replaces.
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

    # --- questions ------------------------------------------------------------------------------------------------

    def credentials(self, mechanism: sasl.Mechanism, name: str) -> sasl.ScramCredentials:
        """What a `ScramServer` looks up: the user's credentials, or decoys where there is no such user."""
        # The decoys are made in both cases, because the time they take would show that the user does not exist.
        decoys = sasl.decoy_credentials(mechanism, name, secret=self.decoy_secret, iterations=self.iterations)
        user = self.by_name.get(name)
        return decoys if user is None else user.credentials[mechanism]

    def check_password(self, name: str, password: str) -> bool:
        """Whether the user exists and has this password. Takes about ten milliseconds in both cases, by design."""
        credentials = self.credentials(sasl.Mechanism.SCRAM_SHA512, name)
        return sasl.password_matches(sasl.Mechanism.SCRAM_SHA512, password, credentials)

    @property
    def has_admin(self) -> bool:
        """Whether a user may make users. Where none may, none ever will."""
        return any(self.is_admin(name) for name in self.by_name)

    def is_admin(self, name: str) -> bool:
        """Whether a user may do everything on the node, and make users."""
        return self.may(name, Action.SECURITY, None)

    def grants_of(self, name: str) -> frozenset[Grant]:
        """All grants of a user, its own and those of its groups; none where there is no such user."""
        user = self.by_name.get(name)
        return frozenset() if user is None else self._granted.get(name, user.grants)

    def may(
        self, name: str, action: Action, bucket: str | None, *, scope: str | None = None, collection: str | None = None
    ) -> bool:
        """Whether the user may do this on the bucket or a collection of it, or on the node where `bucket` is None."""
        return any(grant.allows(action, bucket, scope, collection) for grant in self.grants_of(name))

    def visible(self, name: str, bucket: str, manifest: Manifest) -> Manifest:
        """The collections of a bucket that the user has to do with: kv_engine shows no others, either."""
        grants = [grant for grant in self.grants_of(name) if grant.allows(Action.USE, bucket)]
        if any(grant.scope == ALL for grant in grants):
            return manifest
        scopes = []
        for scope in manifest.scopes:
            seen = [one for one in scope.collections if any(grant.covers(scope.name, one.name) for grant in grants)]
            if seen or scope.id == DEFAULT_SCOPE:  # Which every manifest has.
                scopes.append(replace(scope, collections=tuple(seen)))
        return replace(manifest, scopes=tuple(scopes))


def _stamped(user: User, before: User | None, at_ms: int) -> User:
    is_same_password = before is not None and before.credentials == user.credentials
    return replace(user, changed_ms=at_ms, password_changed_ms=user.password_changed_ms if is_same_password else at_ms)


def newest_removed(removed: Mapping[str, int]) -> dict[str, int]:
    """As many removals as are remembered."""
    return dict(sorted(removed.items(), key=lambda entry: (entry[1], entry[0]))[-REMOVED_MAX:])


def hash_password(password: str, *, salts: bytes, iterations: int) -> dict[sasl.Mechanism, sasl.ScramCredentials]:
    """What is kept of a password: credentials for every mechanism, each with a salt of its own."""
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
    # HTTP's basic authentication ends a name at the first colon. Not printable includes what is not UTF-8.
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

# A role is written `admin`, `data_reader[travel]` or `data_reader[*]`, several of them with commas in between. Data
# roles may also name a scope and a collection, `data_reader[travel:inventory:hotels]`. Streams are those of whole
# buckets here, and so is the role to read them.

_ROLE = re.compile(r"(?P<name>\w+)(?:\[(?P<parameters>[^\[\]]+)\])?")
_ROLE_CHARS_SHOWN = 64
_BUCKET = ("bucket_name",)
_COLLECTION = ("bucket_name", "scope_name", "collection_name")
_OF_WHOLE_BUCKETS = frozenset({Role.DATA_DCP_READER})


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
    KnownRole(
        role=Role.ADMIN,
        title="Full Admin",
        # The Python SDK's own tests look for these words.
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
"""The node's own roles, which Couchbase has other names for; the last one where it is not of the whole node."""


def parse_roles(text: str, *, is_there: Callable[[Grant], bool]) -> frozenset[Grant]:
    """The grants that the roles stand for. `is_there` says whether what a grant names exists."""
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
    """The grants as Couchbase's REST interface has roles."""
    named = {known for grant in grants for known in _named(grant)}
    return [describe_role(_BY_NAME[role], *on) for role, *on in sorted(named)]


def _named(grant: Grant) -> list[tuple[Role, str, str, str]]:
    roles = (Role.ADMIN,) if grant == Grant(Role.ADMIN) else _AS_COUCHBASE_HAS_IT.get(grant.role, (grant.role,))
    return [(role, grant.bucket, grant.scope, grant.collection) for role in roles]


def describe_role(known: KnownRole, bucket: str, scope: str = ALL, collection: str = ALL) -> dict[str, str]:
    return {"role": known.name, **dict(zip(known.parameters, (bucket, scope, collection), strict=False))}
