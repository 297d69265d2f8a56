"""What log messages carry for programs, beside their words: `logger.info("…", extra=fields(vbucket=7))`.

The names are the same in all parts, so that a log can be searched by them. `--log-format json` writes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypedDict, Unpack


class LogEvent(StrEnum):
    """What a message is about. The words of a message may change, this does not."""

    BATCH_FAILED = "batch_failed"
    """A process of Spark has died under a batch, or it could not be cut at one moment: it is tried again."""
    BATCH_LANDED = "batch_landed"
    """A batch of changes is in the tables."""
    CLUSTER_CONFIG = "cluster_config"
    """Another config of the cluster counts: after a failover, a rebalance, or when nodes come and go."""
    BUCKETS_CHANGED = "buckets_changed"
    """A bucket was made, changed, flushed or dropped."""
    COLLECTIONS_CHANGED = "collections_changed"
    """A scope or a collection was created, dropped or changed."""
    COLUMNS_ADDED = "columns_added"
    """A table of documents has got columns for fields that have come up."""
    COLUMNS_MISSING = "columns_missing"
    """A table of documents is to be clustered by columns that have not come up, or whose values have no order."""
    COMPILING = "compiling"
    """Kernels have to be compiled first, which takes a while on a new machine."""
    CONNECTION_DROPPED = "connection_dropped"
    """A peer was cut off: it was silent, did not log in, or did not follow the protocol."""
    CONNECTION_LOST = "connection_lost"
    """A connection to a node has ended, and is made again."""
    CONNECTION_MADE_AGAIN = "connection_made_again"
    """A connection to a node that had ended is there again."""
    CONNECTION_REFUSED = "connection_refused"
    """There were too many connections."""
    DASHBOARD_FAILED = "dashboard_failed"
    """The dashboard could not take the numbers of the node."""
    DCP_CLOSED = "dcp_closed"
    """A DCP connection has ended."""
    DCP_OPENED = "dcp_opened"
    """A DCP connection was opened."""
    DENIED = "denied"
    """A user has asked for what it may not."""
    GROUPS_GROWN = "groups_grown"
    """The tables of a landing have become large, and were cut into more groups."""
    LANDING_NOT_NOTED = "landing_not_noted"
    """A landing could not write beside its tables how it stands, for its page. It goes on."""
    LANDING_STOPPED = "landing_stopped"
    """A landing was ended by a signal."""
    LOGIN_FAILED = "login_failed"
    """A user name or a password was wrong, or there were too many failures before."""
    LOGIN_UNUSED = "login_unused"
    """The environment names a user, but the node has users already, and none of them is changed by that."""
    NEW_BRANCH = "new_branch"
    """The node was not stopped in order, or its data is a copy: the vbuckets of a bucket begin a new branch."""
    NODE_ENDED = "node_ended"
    """A node of `serve --nodes` has ended by itself."""
    NODE_FAILED = "node_failed"
    """The node could not be started, or has to stop."""
    NODE_READY = "node_ready"
    """The node is served."""
    PLANNER_UNREACHABLE = "planner_unreachable"
    """A task of a `dcp` stream can't report how far it has read."""
    REPLICAS_HELD = "replicas_held"
    """A drill: the replicas of the node fall behind."""
    REPLICAS_RELEASED = "replicas_released"
    """A drill: they catch up."""
    REPLICATION_FAILED = "replication_failed"
    """A connection by which replicas are fed has failed, and is tried again."""
    ROLLED_BACK = "rolled_back"
    """A vbucket was taken back: by a drill, or as a replica of one that was; its consumers have to roll back."""
    ROLLBACK_DEMANDED = "rollback_demanded"
    """A consumer that asked for a stream has to roll back first."""
    STORE_FAILED = "store_failed"
    """Something could not be written to the disk."""
    TABLE_RETURNED = "table_returned"
    """A table of documents that was set aside is in order again."""
    TABLE_SET_ASIDE = "table_set_aside"
    """A table of documents has a fault of its own, and is tried again later. All other tables go on."""
    USERS_CHANGED = "users_changed"
    """A user was added, changed or removed, or has changed its own password."""
    VBUCKET_DAMAGED = "vbucket_damaged"
    """What is stored is not what was written. The vbucket that is named is stopped; without one it is the bucket's."""
    VBUCKET_FETCHED = "vbucket_fetched"
    """A replica that was damaged is fetched from its active copy again."""


class Fields(TypedDict, total=False):
    """The names, and what they mean."""

    event: Annotated[LogEvent, "what the message is about, from the table below"]
    address: Annotated[str, "the other node, or the node's own address"]
    batch: Annotated[int, "the number of a landed batch"]
    bucket: Annotated[str, "the bucket's name"]
    changed_user: Annotated[str, "the name of the user that was added, changed or removed"]
    changes: Annotated[int, "how many changes"]
    config: Annotated[int, "the revision of the cluster config"]
    connection: Annotated[str, "the name of a DCP connection"]
    dashboard: Annotated[str, "the URL of the dashboard"]
    duration_s: Annotated[float, "how long it took, in seconds"]
    error: Annotated[str, "the class of the error, as the reference of errors names it"]
    from_seqno: Annotated[int, "the last seqno before a rollback"]
    left_out: Annotated[int, "how many messages of this kind, by this peer, were not logged before this one"]
    limit: Annotated[int, "the limit that was met"]
    manifest: Annotated[str, "the uid of the collections manifest, in hex"]
    method: Annotated[str, "the HTTP method"]
    path: Annotated[str, "the path of a request, or of a file"]
    peer: Annotated[str, "the address of who has connected"]
    reason: Annotated[str, "why, in words"]
    replicas: Annotated[int, "how many replicas"]
    rollbacks: Annotated[int, "how many rollbacks"]
    seqno: Annotated[int, "the seqno; of a rollback the last one that stays"]
    table: Annotated[str, "the name of a table: scope.collection"]
    user: Annotated[str | None, "the name of a user"]
    vbucket: Annotated[int, "the number of a vbucket"]
    vbuckets: Annotated[int, "how many vbuckets"]
    vbuuid: Annotated[int, "the branch of the vbucket's history that counts now"]


def fields(**values: Unpack[Fields]) -> dict[str, Any]:
    """For `extra` of a log call."""
    return dict(values)
