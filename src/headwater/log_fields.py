"""Fields that log messages carry for programs, in addition to the text: `logger.info("…", extra=fields(vbucket=7))`.

All parts use the same names, so that a log can be searched by them. `--log-format json` writes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypedDict, Unpack


class LogEvent(StrEnum):
    """What a message is about. Its wording may change, this does not."""

    BATCH_FAILED = "batch_failed"
    """A process of Spark died during a batch, or no consistent moment was found: the landing retries the batch."""
    BATCH_LANDED = "batch_landed"
    """A batch of changes has landed in the tables."""
    CLUSTER_CONFIG = "cluster_config"
    """The cluster config has changed: after a failover, a rebalance, or when nodes join or leave."""
    BUCKETS_CHANGED = "buckets_changed"
    """A bucket was created, changed, flushed or dropped."""
    COLLECTIONS_CHANGED = "collections_changed"
    """A scope or a collection was created, dropped or changed."""
    COLUMNS_ADDED = "columns_added"
    """A table of documents got columns for new fields."""
    COLUMNS_MISSING = "columns_missing"
    """A table of documents should be clustered by columns that do not exist yet, or whose values have no order."""
    COMPILING = "compiling"
    """Kernels are being compiled, which takes a while on a new machine."""
    CONNECTION_DROPPED = "connection_dropped"
    """The node dropped a peer: it was silent, did not log in, or violated the protocol."""
    CONNECTION_LOST = "connection_lost"
    """A connection to a node was lost; the client reconnects."""
    CONNECTION_MADE_AGAIN = "connection_made_again"
    """A lost connection to a node is open again."""
    CONNECTION_REFUSED = "connection_refused"
    """There were too many connections."""
    DASHBOARD_FAILED = "dashboard_failed"
    """The dashboard could not sample the numbers of the node."""
    DCP_CLOSED = "dcp_closed"
    """A DCP connection has ended."""
    DCP_OPENED = "dcp_opened"
    """A DCP connection was opened."""
    DENIED = "denied"
    """A user requested something without the privilege for it."""
    GROUPS_GROWN = "groups_grown"
    """The tables of a landing have grown, and were divided into more groups."""
    LANDING_FAILED = "landing_failed"
    """One of several pipelines has ended with an error. The others continue."""
    LANDING_NOT_NOTED = "landing_not_noted"
    """A landing could not write its status for its page. It continues."""
    LANDING_STOPPED = "landing_stopped"
    """A landing was ended by a signal."""
    LOGIN_FAILED = "login_failed"
    """A user name or a password was wrong, or there were too many failures."""
    LOGIN_UNUSED = "login_unused"
    """The environment names a user, but the node already has users, and changes none of them."""
    MERGES_SLOW = "merges_slow"
    """Merges of documents take more than half of the time, or miss `--fresh`."""
    NEW_BRANCH = "new_branch"
    """The node was not stopped cleanly, or its data is a copy: the vbuckets of a bucket begin a new branch."""
    NODE_ENDED = "node_ended"
    """A node of `serve --nodes` has ended by itself."""
    NODE_FAILED = "node_failed"
    """The node could not be started, or has to stop."""
    NODE_READY = "node_ready"
    """The node serves requests."""
    PLANNER_UNREACHABLE = "planner_unreachable"
    """A task of a `dcp` stream can't report its progress."""
    REPLICAS_HELD = "replicas_held"
    """A drill: the replicas of the node fall behind."""
    REPLICAS_RELEASED = "replicas_released"
    """A drill: they catch up."""
    REPLICATION_FAILED = "replication_failed"
    """A connection that feeds replicas failed; the node retries."""
    ROLLED_BACK = "rolled_back"
    """A vbucket was rolled back: by a drill, or as a replica of one that was; its consumers have to roll back."""
    ROLLBACK_DEMANDED = "rollback_demanded"
    """A consumer that asked for a stream has to roll back first."""
    STORE_FAILED = "store_failed"
    """The node could not write to the disk."""
    TABLE_NOT_REGISTERED = "table_not_registered"
    """A catalog did not register a table; the landing retries it later."""
    TABLE_REGISTERED = "table_registered"
    """A catalog has registered a table that was missing there."""
    TABLE_RETURNED = "table_returned"
    """A table of documents that was set aside works again."""
    TABLE_SET_ASIDE = "table_set_aside"
    """A table of documents has a fault; the landing retries it later. All other tables continue."""
    USERS_CHANGED = "users_changed"
    """A user was added, changed or removed, or has changed its own password."""
    VBUCKET_DAMAGED = "vbucket_damaged"
    """Stored data is not what was written. The named vbucket is stopped; without one, it concerns the bucket."""
    VBUCKET_FETCHED = "vbucket_fetched"
    """A damaged replica is fetched again from its active copy."""


class Fields(TypedDict, total=False):
    """The names of the fields, and what they mean."""

    event: Annotated[LogEvent, "what the message is about, from the table below"]
    address: Annotated[str, "the other node, or the node's own address"]
    batch: Annotated[int, "the number of a landed batch"]
    bucket: Annotated[str, "the bucket's name"]
    changed_user: Annotated[str, "the name of the user that was added, changed or removed"]
    changes: Annotated[int, "how many changes of documents"]
    system_events: Annotated[int, "how many events of collections and scopes, once for each vbucket"]
    config: Annotated[int, "the revision of the cluster config"]
    connection: Annotated[str, "the name of a DCP connection"]
    dashboard: Annotated[str, "the URL of the dashboard"]
    duration_s: Annotated[float, "how long it took, in seconds"]
    error: Annotated[str, "the class of the error, as in the reference of errors"]
    from_seqno: Annotated[int, "the last seqno before a rollback"]
    left_out: Annotated[int, "how many messages of this kind from this peer were suppressed before this one"]
    limit: Annotated[int, "the limit that was reached"]
    manifest: Annotated[str, "the uid of the collections manifest, in hex"]
    method: Annotated[str, "the HTTP method"]
    path: Annotated[str, "the path of a request, or of a file"]
    pipeline: Annotated[str, "the name of a pipeline, if one process lands several"]
    peer: Annotated[str, "the address of the connected peer"]
    reason: Annotated[str, "the reason, as text"]
    replicas: Annotated[int, "how many replicas"]
    rollbacks: Annotated[int, "how many rollbacks"]
    seqno: Annotated[int, "the seqno; for a rollback, the last one that is kept"]
    table: Annotated[str, "the name of a table: scope.collection"]
    user: Annotated[str | None, "the name of a user"]
    vbucket: Annotated[int, "the number of a vbucket"]
    vbuckets: Annotated[int, "how many vbuckets"]
    vbuuid: Annotated[int, "the current branch of the vbucket's history"]


def fields(**values: Unpack[Fields]) -> dict[str, Any]:
    """The `extra` of a log call."""
    return dict(values)
