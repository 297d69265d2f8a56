"""Handlers that create, change, flush and drop buckets, and name the cluster, as in Couchbase's cluster manager.

A setting that the node does not support is refused with the reason, not ignored. In a cluster, the node that gets a
request carries it out on all nodes: it creates a bucket on each, and the coordinator distributes the vbuckets; settings
and names travel with the published config; a flush and a drop run on every node. If a node did not do its part, the
answer names it, and repeating the request does the rest.
"""

from __future__ import annotations

import asyncio
import base64
import http
import http.client
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import Response

from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.errors import HeadwaterError, LocalProtocolError, MalformedJson
from headwater.http import ask
from headwater.log_fields import LogEvent
from headwater.node.auth.users import Action
from headwater.node.http.call import Call, Refusal
from headwater.node.http.pools import DURABILITY_LEVELS
from headwater.node.membership import PEER_FEATURES
from headwater.node.options import (
    HISTORY_BYTES_MAX,
    HISTORY_BYTES_MIN,
    HISTORY_S_MAX,
    MAX_TTL_S_MAX,
    RAM_QUOTA_MB_MAX,
    RAM_QUOTA_MB_MIN,
    REPLICAS_MAX,
    BucketSettings,
    check_bucket_name,
    check_cluster_name,
    peer_context,
)
from headwater.phrases import parse_number
from headwater.protocol.cluster_config import NO_NODE, ClusterConfig, NodeAddress, PublishedConfig
from headwater.protocol.sasl import Credentials

if TYPE_CHECKING:
    from headwater.node.node_state import Coordinator

OTHER_NODE_S_MAX = 20.0
OTHER_NODE_BYTES_MAX = 64 * 1024
"""How long another node of the cluster may take for its part of a change, and how long its answer may be."""
_OWN_BUCKETS = ("headwater", "buckets")

# --- the fields of the forms --------------------------------------------------------------------------------------

_NUMBERS: dict[str, tuple[str, int, int]] = {
    # Newer servers accept both names.
    "ramQuota": ("ram_quota_mb", RAM_QUOTA_MB_MIN, RAM_QUOTA_MB_MAX),
    "ramQuotaMB": ("ram_quota_mb", RAM_QUOTA_MB_MIN, RAM_QUOTA_MB_MAX),
    "replicaNumber": ("replicas", 0, REPLICAS_MAX),
    "maxTTL": ("max_ttl_s", 0, MAX_TTL_S_MAX),
    "historyRetentionSeconds": ("history_s", 0, HISTORY_S_MAX),
    "historyRetentionBytes": ("history_bytes", 0, HISTORY_BYTES_MAX),
}
_FLAGS = {"flushEnabled": "flush_enabled", "historyRetentionCollectionDefault": "history_default"}
_OWN_FLAGS = {"isForming": "is_forming", "durableAlone": "durable_alone"}
"""Fields that only nodes send to each other."""
_CHOICES: dict[str, tuple[str, dict[str, str | int], str]] = {
    "storageBackend": (
        "storage_backend",
        {"couchstore": "couchstore", "magma": "magma"},
        "storage backend must be couchstore or magma",
    ),
    "conflictResolutionType": (
        "conflict_resolution",
        {"seqno": "seqno", "lww": "lww"},
        # The SDKs look for these words.
        "Conflict resolution type must be 'seqno' or 'lww'; 'custom' is supported only with developer preview enabled",
    ),
    "compressionMode": (
        "compression_mode",
        {mode: mode for mode in ("off", "passive", "active")},
        "compressionMode can be set to 'off', 'passive' or 'active'",
    ),
    "durabilityMinLevel": (
        "durability_min_level",
        {name: level for level, name in enumerate(DURABILITY_LEVELS)},
        f"Durability minimum level must be one of {', '.join(DURABILITY_LEVELS)}",
    ),
}
"""Settings that take one of some words: the setting, the value of each word, and Couchbase's error for others."""
_LASTING = {
    "storageBackend": "Storage backend not allowed in update bucket",
    "conflictResolutionType": "Conflict resolution type not allowed in update bucket",
}
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
_FIXED: dict[str, tuple[frozenset[str], str]] = {
    "bucketType": (
        frozenset({"membase", "couchbase"}),
        "Buckets keep their documents on disk: take bucketType couchbase",
    ),
    "evictionPolicy": (frozenset({"valueOnly"}), "Keys stay in memory and values need not: take valueOnly"),
    "replicaIndex": (frozenset({"0", "false"}), "There are no views, so their indexes have no replicas: take 0"),
}
"""Settings of Couchbase for which a bucket here has only one value."""
_SETTINGS = (*_NUMBERS, *_FLAGS, *_CHOICES, *_FIXED)
_VBUCKETS_MAX = 1024


def _asked_settings(form: Mapping[str, str], before: BucketSettings) -> BucketSettings:
    """The settings after a form is applied. One refusal lists everything that is wrong with it, as in Couchbase."""
    changes: dict[str, int | str] = {}
    errors: dict[str, str] = {}
    for name, text in form.items():
        if name in _NUMBERS:
            setting, smallest, largest = _NUMBERS[name]
            number = parse_number(text, largest)
            changes[setting] = 0 if number is None else number
            if number is None or number < smallest:
                errors[name] = f"A number from {smallest} to {largest}"
        elif name in _FLAGS or name in _OWN_FLAGS:
            changes[_FLAGS.get(name) or _OWN_FLAGS[name]] = _BOOLEANS.get(text, False)
            if text not in _BOOLEANS:
                errors[name] = "Either 1 or 0"
        elif name in _CHOICES:
            setting, values, error = _CHOICES[name]
            changes[setting] = values.get(text, "")
            if text not in values:
                errors[name] = error
        elif name in _FIXED and text not in _FIXED[name][0]:
            errors[name] = _FIXED[name][1]
    if changes.get("storage_backend") == "magma" != before.storage_backend:
        # Couchbase's default for such a bucket.
        changes.setdefault("history_default", True)
    settings = replace(before, **changes)  # type: ignore[arg-type]
    if errors := errors or _contradictions(settings):
        raise Refusal(400, {"errors": errors})
    return settings


def _contradictions(settings: BucketSettings) -> dict[str, str]:
    """Combinations that no bucket of Couchbase can have, though each setting by itself is valid."""
    errors = {}
    if settings.storage_backend != "magma":
        wanted = {
            "historyRetentionSeconds": settings.history_s,
            "historyRetentionBytes": settings.history_bytes,
            "historyRetentionCollectionDefault": settings.history_default,
        }
        errors = {name: "History Retention can only be used with Magma" for name, value in wanted.items() if value}
    elif 0 < settings.history_bytes < HISTORY_BYTES_MIN:
        errors = {"historyRetentionBytes": f"The value must be 0, or from {HISTORY_BYTES_MIN} to {HISTORY_BYTES_MAX}"}
    if settings.durability_min_level and settings.replicas == REPLICAS_MAX:
        errors["durabilityMinLevel"] = f"Durability minimum level cannot be specified with {REPLICAS_MAX} replicas"
    return errors


def _asked_vbuckets(form: Mapping[str, str], default: int) -> int:
    number = parse_number(form.get("numVBuckets", str(default)), _VBUCKETS_MAX)
    if not number or number & (number - 1):
        raise Refusal.errors(400, f"A power of two, from 1 to {_VBUCKETS_MAX}", field="numVBuckets")
    return number


def _asked_name(form: Mapping[str, str]) -> str:
    name = form.get("name", "")
    try:
        check_bucket_name(name)
    except LocalProtocolError as error:
        raise Refusal.errors(400, f"{error.reason}: {error.hint}", field="name") from error
    return name


def _check_full_admin(call: Call) -> None:
    """Some changes affect more than the bucket: the node's disk, or the config that only full admins may publish."""
    if not call.node.users.may(call.user, Action.SECURITY, None):
        raise Refusal(
            403,
            {
                "message": "Forbidden. User needs the following permissions",
                "permissions": ["cluster.buckets!create", "cluster.admin.security.admin!write"],
            },
        )


def _log(call: Call, what: str, bucket: str) -> None:
    call.node.log(
        f"{call.user!r} {what} bucket {bucket!r}", event=LogEvent.BUCKETS_CHANGED, user=call.user, bucket=bucket
    )


# --- creating -----------------------------------------------------------------------------------------------------


async def create_bucket(call: Call) -> Response:
    """Create a bucket on all nodes of the cluster, and answer once it is served."""
    name, settings, vbuckets = await _asked_bucket(call)
    others = OtherNodes.of(call)
    if others.nodes:
        await _create_on_all(call, others, name, settings, vbuckets)
    else:
        await call.node.create_bucket(name, settings, vbuckets=vbuckets)
    _log(call, "made", name)
    return Response(status_code=202)


async def create_bucket_here(call: Call) -> Response:
    """Create a bucket on this node alone. With `isForming`, it waits for the config of its cluster."""
    name, settings, vbuckets = await _asked_bucket(call, *_OWN_FLAGS)
    await call.node.create_bucket(name, settings, vbuckets=vbuckets)
    _log(call, "made", name)
    return Response(status_code=202)


async def _asked_bucket(call: Call, *more: str) -> tuple[str, BucketSettings, int]:
    """The name, the settings and the number of vbuckets in a form."""
    form = await call.form("name", *_SETTINGS, *more, "numVBuckets")
    options = call.node.options
    name, settings = _asked_name(form), _asked_settings(form, BucketSettings(durable_alone=options.durable_alone))
    vbuckets = _asked_vbuckets(form, options.vbuckets)
    if call.node.bucket(name) is not None:
        # The SDKs look for these words.
        raise Refusal.errors(400, "Bucket with given name already exists", field="name")
    return name, settings, vbuckets


async def _create_on_all(call: Call, others: OtherNodes, name: str, settings: BucketSettings, vbuckets: int) -> None:
    """Create the bucket on each node, where it waits, and then distribute its vbuckets. If that fails, remove it.

    A node that can't be reached by then removes it at its next start, because it has got no config of it.
    """
    forming = replace(settings, is_forming=True)
    await call.node.create_bucket(name, forming, vbuckets=vbuckets)
    form = {"name": name, **_form_of(forming), "numVBuckets": str(vbuckets)}
    replies = await others.ask("POST", *_OWN_BUCKETS, form=form)
    failed = _failed(replies)
    try:
        if failed:
            raise Refusal.errors(503, f"The bucket was not made: {_describe(failed)}")
        with closing(others.coordinator(call, name)) as coordinator:
            await coordinator.init(replicas=settings.replicas, settings=settings.encode())
    except BaseException as error:
        await others.ask("DELETE", *_OWN_BUCKETS, name, only=replies.keys() - failed.keys())
        await call.node.drop_bucket(name)
        if isinstance(error, HeadwaterError):
            raise Refusal.errors(503, f"The bucket was not made: {error}") from error
        raise


def _form_of(settings: BucketSettings) -> dict[str, str]:
    """The settings as a form that requests them."""
    members = settings.encode()
    form = {name: str(members[setting]) for name, (setting, _, _) in _NUMBERS.items() if members[setting] is not None}
    form |= {name: "1" if members[setting] else "0" for name, setting in (_FLAGS | _OWN_FLAGS).items()}
    for name, (setting, values, _) in _CHOICES.items():
        form[name] = next(word for word, value in values.items() if value == members[setting])
    return form


# --- changing -----------------------------------------------------------------------------------------------------


async def update_bucket(call: Call) -> Response:
    name = call.bucket.facts.name
    form = await call.form("name", *_SETTINGS)
    if form.get("name", name) != name:
        raise Refusal.errors(400, "A bucket keeps its name", field="name")
    config = call.node.membership(name).config
    before = call.service.settings
    for lasting, error in _LASTING.items():
        if form.get(lasting, _form_of(before)[lasting]) != _form_of(before)[lasting]:
            raise Refusal.errors(400, error, field=lasting)
    settings = _asked_settings(form, before if config is None else replace(before, replicas=config.replicas))
    if config is None:
        await call.node.change_settings(name, settings)
    else:
        _check_full_admin(call)
        await _publish(call, name, lambda config: _with_settings(config, settings))
    _log(call, "changed the settings of", name)
    return Response()


def _with_settings(config: PublishedConfig, settings: BucketSettings) -> PublishedConfig:
    """The same config with other settings. The next rebalance brings another number of replicas about."""
    copies = settings.replicas + 1
    rows = tuple((*row, *(NO_NODE,) * copies)[:copies] for row in config.rows)
    is_settled = config.settled and settings.replicas == config.replicas
    return replace(config, settings=settings.encode(), replicas=settings.replicas, rows=rows, settled=is_settled)


async def _publish(call: Call, bucket: str, change: Callable[[PublishedConfig], PublishedConfig]) -> None:
    try:
        with closing(OtherNodes.of(call).coordinator(call, bucket)) as coordinator:
            await coordinator.change(change)
    except HeadwaterError as error:
        raise Refusal.errors(503, f"Not all nodes of the cluster have it: {error}") from error


async def flush_bucket(call: Call) -> Response:
    """Drop all documents on all nodes. The vbuckets begin new histories, so every consumer rolls back to 0."""
    name = call.bucket.facts.name
    await call.node.flush_bucket(name)
    replies = await OtherNodes.of(call).ask("POST", *_OWN_BUCKETS, name, "flush")
    if failed := _failed(replies):
        raise Refusal.errors(503, f"The bucket was flushed, but {_describe(failed)}")
    _log(call, "flushed", name)
    return Response()


async def flush_bucket_here(call: Call) -> Response:
    """Drop all documents of the vbuckets that are active on this node."""
    await call.node.flush_bucket(call.bucket.facts.name)
    return Response()


# --- dropping -----------------------------------------------------------------------------------------------------


async def drop_bucket(call: Call) -> Response:
    """Drop a bucket on all nodes, on this one last, so that the request can be repeated if another node fails."""
    name = call.bucket.facts.name
    replies = await OtherNodes.of(call).ask("DELETE", *_OWN_BUCKETS, name)
    if failed := _failed({node: reply for node, reply in replies.items() if reply.status != 404}):
        raise Refusal.errors(503, f"The bucket is not dropped everywhere, try again: {_describe(failed)}")
    return await drop_bucket_here(call)


async def drop_bucket_here(call: Call) -> Response:
    name = call.bucket.facts.name
    await call.node.drop_bucket(name)
    _log(call, "dropped", name)
    return Response()


# --- the cluster --------------------------------------------------------------------------------------------------

_QUOTA = "memoryQuota"
_NO_SERVICES = tuple(f"{service}MemoryQuota" for service in ("index", "fts", "cbas", "eventing", "query"))


async def change_pool(call: Call) -> Response:
    """Name the cluster, and store the memory quota of its buckets."""
    form = await call.form("clusterName", _QUOTA, *_NO_SERVICES)
    name, quotas = _asked_identity(call, form)
    replies = await OtherNodes.of(call).ask("POST", "headwater", "node", form=form)
    call.node.change_identity(cluster_name=name, quotas_mb=quotas)
    if failed := _failed(replies):
        raise Refusal.errors(503, f"Not all nodes of the cluster have it: {_describe(failed)}")
    if "clusterName" in form:
        for bucket in sorted(call.node.bucket_names()):
            if call.node.membership(bucket).config is not None:
                await _publish(call, bucket, lambda config: replace(config, cluster_name=name))
    call.node.log(f"{call.user!r} changed the cluster to {form}", event=LogEvent.CLUSTER_CONFIG, user=call.user)
    return Response()


async def change_node(call: Call) -> Response:
    """Apply the same change to what this node stores."""
    name, quotas = _asked_identity(call, await call.form("clusterName", _QUOTA, *_NO_SERVICES))
    call.node.change_identity(cluster_name=name, quotas_mb=quotas)
    return Response()


def _asked_identity(call: Call, form: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    identity = call.node.identity
    name, quotas = form.get("clusterName", identity.cluster_name), dict(identity.quotas_mb)
    try:
        check_cluster_name(name)
    except LocalProtocolError as error:
        raise Refusal.errors(400, error.reason, field="clusterName") from error
    for quota in _NO_SERVICES:
        if quota in form:
            raise Refusal.errors(400, "The node has no such service: it keeps documents only", field=quota)
    if _QUOTA in form:
        quotas[_QUOTA] = parse_number(form[_QUOTA], RAM_QUOTA_MB_MAX) or 0
        if quotas[_QUOTA] < RAM_QUOTA_MB_MIN:
            raise Refusal.errors(400, f"A number from {RAM_QUOTA_MB_MIN} to {RAM_QUOTA_MB_MAX}", field=_QUOTA)
    return name, quotas


# --- the other nodes of the cluster -------------------------------------------------------------------------------
# This node asks them over HTTP, with the log-in of the request that it is answering. An operation on every node needs a
# right on every node, so it runs as the user who has requested it: nodes have no rights of their own over each other's
# buckets. The requests go to paths of our own, each of which affects one node only.


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node answered, or why it did not."""

    status: int | None
    content: Any

    @property
    def is_done(self) -> bool:
        return self.status is not None and self.status < http.HTTPStatus.MULTIPLE_CHOICES

    @property
    def reason(self) -> str:
        """Why a node has refused or could not be asked."""
        members = self.content if isinstance(self.content, dict) else {}
        errors = members.get("errors", members.get("message", self.content))
        words = errors.values() if isinstance(errors, dict) else [errors]
        return "; ".join(str(word) for word in words) or f"status {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNodes:
    """The other nodes of the cluster that this node is in; none if it is alone."""

    nodes: tuple[NodeAddress, ...]
    credentials: Credentials = field(repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, call: Call) -> OtherNodes:
        """The nodes of this node's config, or of the last one that it had. They are asked as the user of the call."""
        try:
            nodes = ClusterConfig.decode(call.node.cluster_config(None)).nodes
            is_member = any(node.is_this_node for node in nodes)
            others = tuple(node.address() for node in nodes if is_member and not node.is_this_node)
            others = others or call.node.identity.nodes
        except MalformedJson as error:
            raise Refusal.errors(503, f"The node's cluster can't be asked: {error.reason}") from error
        return cls(
            nodes=others, credentials=_credentials(call), tls=peer_context(call.node.options) if others else None
        )

    def coordinator(self, call: Call, bucket: str) -> Coordinator:
        """A coordinator that acts as the user of the call, because only full admins may set a config."""
        nodes = (call.node.address, *self.nodes)
        seeds = [Address(node.host, node.kv_port_for(tls=self.tls is not None)) for node in nodes]
        login = Login(
            credentials=self.credentials, bucket=bucket, tls=self.tls, features=PEER_FEATURES, agent="headwater node"
        )
        return call.node.coordinator(seeds, login)

    async def ask(
        self, method: str, *path: str, form: Mapping[str, str] | None = None, only: Collection[str] | None = None
    ) -> dict[str, Reply]:
        """Ask all of them at the same time, or those named in `only`. Returns the replies by node."""
        asked = [node for node in self.nodes if only is None or node.kv_address in only]
        target = "/" + "/".join(quote(part, safe="") for part in path)
        replies = await asyncio.gather(*(asyncio.to_thread(self._ask, node, method, target, form) for node in asked))
        return {node.kv_address: reply for node, reply in zip(asked, replies, strict=True)}

    def _ask(self, node: NodeAddress, method: str, target: str, form: Mapping[str, str] | None) -> Reply:
        port = node.http_port if self.tls is None else node.http_tls_port
        if port is None:
            return Reply(None, "the config has no management port of it")
        login = self.credentials.user, self.credentials.password
        try:
            limits: Any = {"answer_s": OTHER_NODE_S_MAX, "bytes_max": OTHER_NODE_BYTES_MAX}
            return Reply(*ask(node.host, port, method, target, login=login, form=form, tls=self.tls, **limits))
        except (OSError, http.client.HTTPException, HeadwaterError) as error:
            return Reply(None, f"it can't be reached: {error}")


def _credentials(call: Call) -> Credentials:
    """The credentials of the request. They have been checked, so the header is valid."""
    encoded = call.request.headers.get("authorization", "").partition(" ")[2]
    user, _, password = base64.b64decode(encoded).decode().partition(":")
    return Credentials(user, password)


def _failed(replies: Mapping[str, Reply]) -> dict[str, Reply]:
    return {node: reply for node, reply in replies.items() if not reply.is_done}


def _describe(failed: Mapping[str, Reply]) -> str:
    """Which nodes have failed, and why."""
    return "; ".join(f"not on {node}: {reply.reason}" for node, reply in failed.items())
