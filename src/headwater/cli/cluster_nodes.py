"""The management sides of all nodes of a cluster, for what has to be done on each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwater.cli.management_api import Management
from headwater.client.connection_string import Address
from headwater.errors import HeadwaterError


def nodes_of_cluster(first: Management, *, bucket: str = "") -> list[Management]:
    """A node, and the others of the cluster that it is in, or that this bucket of it is in.

    Of a Couchbase cluster it is the one node alone: there, what is done on one is done on all of them.
    """
    pools = first.ask("GET", "pools").accepted()
    if not isinstance(pools, dict) or "headwater" not in str(pools.get("implementationVersion", "")):
        return [first]
    path = ("b", bucket) if bucket else ("nodeServices",)
    config = first.ask("GET", "pools", "default", *path).accepted()
    try:
        members = config["nodesExt"]
        if not any(member.get("thisNode") for member in members):
            # It was left out of the cluster that it tells of, or has never been in one.
            return [first]
        others = [_address(member, first) for member in members if not member.get("thisNode")]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise HeadwaterError(
            "the node does not tell the addresses of its cluster", hint="Give --this-node-only, and each node's URL"
        ) from error
    return [first, *(replace(first, address=address) for address in others)]


def _address(member: dict[str, Any], first: Management) -> Address:
    port = int(member["services"]["mgmt" if first.tls is None else "mgmtSSL"])
    return Address(str(member.get("hostname") or first.address.host), port)
