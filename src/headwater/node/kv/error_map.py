"""The error map: what each status is called and how a client should take it (`kv_engine/docs/ErrorMap.md`)."""

from __future__ import annotations

import json

from headwater.errors import STATUS_ERRORS
from headwater.protocol.status import SUCCESSFUL, Status

ERROR_MAP_VERSION = 2
_REVISION = 1

_CONNECTION_STATE = frozenset({Status.NO_BUCKET, Status.AUTH_STALE, Status.AUTH_ERROR, Status.NOT_INITIALIZED})
_CONSTRAINTS = frozenset(
    {Status.KEY_ENOENT, Status.KEY_EEXISTS, Status.NOT_STORED, Status.DELTA_BADVAL, Status.LOCKED, Status.NOT_LOCKED}
)


def error_map(version: int) -> bytes:
    """The map as JSON."""
    errors = {
        f"{status.value:x}": {
            "name": status.name,
            "desc": status.name.replace("_", " ").capitalize(),
            "attrs": _attributes(status),
        }
        for status in Status
    }
    return json.dumps({"version": version, "revision": _REVISION, "errors": errors}).encode()


def _attributes(status: Status) -> list[str]:
    if status in SUCCESSFUL:
        return ["success"]
    attributes = []
    if status == Status.NOT_MY_VBUCKET:
        attributes.append("fetch-config")
    if status.name.startswith("SUBDOC_"):
        attributes.append("subdoc")
    if status in _CONSTRAINTS:
        attributes.append("item-only")
    if status in _CONNECTION_STATE:
        attributes.append("conn-state-invalidated")
    error = STATUS_ERRORS.get(status)
    if error is not None and error.retriable and not error.stale_topology:
        attributes += ["temp", "retry-later"]
    return attributes or ["invalid-input"]
