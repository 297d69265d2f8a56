"""Handlers for what clients bootstrap from: the pool, its buckets and their configs.

All answers are built from the cluster config of the key-value side, so that every way to bootstrap leads to the same
nodes. No handler here changes anything (`bucket_management` does).
"""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from headwater.node.auth.users import Action, Grant, Role
from headwater.node.http.call import Call, Json
from headwater.node.options import BucketSettings
from headwater.protocol.cluster_config import ClusterConfig, ConfigNode, bucket_uri, join_host_port
from headwater.protocol.manifest import COLLECTIONS_MAX, SCOPES_MAX
from headwater.store.bucket import Bucket

DURABILITY_LEVELS = ("none", "majority", "majorityAndPersistActive", "persistToMajority")
"""Couchbase's names of the levels, by number."""
_MB = 1024 * 1024
_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_SYSTEM = f"{platform.machine()}-{sys.platform}"


async def show_pools(call: Call) -> Response:
    node, uuid = call.node, ClusterConfig.decode(call.node.cluster_config(None)).cluster_uuid
    return Json(
        {
            "isAdminCreds": node.users.may(call.user, Action.SECURITY, None),
            "isROAdminCreds": Grant(Role.RO_ADMIN) in node.users.grants_of(call.user),
            "isEnterprise": False,
            "allowedServices": ["kv"],
            "pools": [
                {
                    "name": "default",
                    "uri": f"/pools/default?uuid={uuid}",
                    "streamingUri": f"/poolsStreaming/default?uuid={uuid}",
                }
            ],
            "uuid": uuid,
            "implementationVersion": node.server_version,
            "componentsVersion": {"ns_server": node.server_version},
        }
    )


async def show_pool(call: Call) -> Response:
    return Json(_pool(call))


async def stream_pool(call: Call) -> Response:
    return call.stream(lambda: json.dumps(_pool(call)).encode())


async def show_node_services(call: Call) -> Response:
    return Json(call.node.cluster_config(None))


async def show_buckets(call: Call) -> Response:
    return Json([_bucket(call, bucket) for bucket in _readable_buckets(call)])


async def show_bucket(call: Call) -> Response:
    return Json(_bucket(call, call.bucket))


async def stream_bucket(call: Call) -> Response:
    return call.stream(lambda: json.dumps(_bucket(call, call.bucket)).encode())


async def show_config(call: Call) -> Response:
    return Json(call.node.cluster_config(call.bucket.facts.name))


async def stream_config(call: Call) -> Response:
    return call.stream(lambda: call.node.cluster_config(call.bucket.facts.name))


# --- what the answers are made of ---------------------------------------------------------------------------------


def _readable_buckets(call: Call) -> list[Bucket]:
    names = (name for name in call.node.bucket_names() if call.node.users.may(call.user, Action.USE, name))
    return [bucket for name in sorted(names) if (bucket := call.node.bucket(name)) is not None]


def _pool(call: Call) -> dict[str, Any]:
    config = ClusterConfig.decode(call.node.cluster_config(None))
    uuid = config.cluster_uuid
    return {
        "name": "default",
        "clusterName": config.cluster_name,
        "nodes": _nodes(call, config),
        "buckets": {
            "uri": f"/pools/default/buckets?uuid={uuid}",
            "terseBucketsBase": "/pools/default/b/",
            "terseStreamingBucketsBase": "/pools/default/bs/",
        },
        "bucketNames": [
            {"bucketName": bucket.facts.name, "uuid": bucket.facts.uuid} for bucket in _readable_buckets(call)
        ],
        "nodeServicesUri": "/pools/default/nodeServices",
        **call.node.identity.quotas_mb,
        "maxCollectionCount": COLLECTIONS_MAX,
        "maxScopeCount": SCOPES_MAX,
        "balanced": True,
        "rebalanceStatus": "none",
    }


def _bucket(call: Call, bucket: Bucket) -> dict[str, Any]:
    facts = bucket.facts
    config = ClusterConfig.decode(call.node.cluster_config(facts.name))
    settings, disk_bytes = call.node.bucket_service(facts.name).settings, call.node.folder.disk_bytes(facts.name)
    quota_bytes = _MACHINE_BYTES if settings.ram_quota_mb is None else settings.ram_quota_mb * _MB
    return {
        "name": facts.name,
        "uuid": facts.uuid,
        "nodeLocator": "vbucket",
        "bucketType": "membase",
        "storageBackend": settings.storage_backend,
        "authType": "sasl",
        "uri": bucket_uri("buckets", facts.name, facts.uuid),
        "streamingUri": bucket_uri("bucketsStreaming", facts.name, facts.uuid),
        "numVBuckets": len(config.rows),
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": config.capabilities,
        "collectionsManifestUid": f"{bucket.manifest.uid:x}",
        "vBucketServerMap": config.server_map,
        "nodes": _nodes(call, config),
        # The SDKs take this path as the sign that the bucket can be flushed.
        "controllers": {"flush": f"{_path(facts.name)}/controller/doFlush"} if settings.flush_enabled else {},
        "replicaNumber": config.replicas,
        "replicaIndex": False,
        "maxTTL": settings.max_ttl_s,
        "compressionMode": settings.compression_mode,
        "conflictResolutionType": settings.conflict_resolution,
        "durabilityMinLevel": DURABILITY_LEVELS[settings.durability_min_level],
        **_history(settings),
        # Keys are always in memory, values need not be.
        "evictionPolicy": "valueOnly",
        "quota": {"ram": quota_bytes * len(config.nodes), "rawRAM": quota_bytes},
        "basicStats": {
            "itemCount": bucket.live_documents(),
            "diskUsed": disk_bytes,
            "dataUsed": disk_bytes,
            "memUsed": bucket.memory_bytes,
            "quotaPercentUsed": 100 * bucket.memory_bytes / max(1, quota_bytes),
        },
    }


def _history(settings: BucketSettings) -> dict[str, Any]:
    """As in Couchbase, only buckets of Magma show how much history they keep."""
    if settings.storage_backend != "magma":
        return {}
    return {
        "historyRetentionSeconds": settings.history_s,
        "historyRetentionBytes": settings.history_bytes,
        "historyRetentionCollectionDefault": settings.history_default,
    }


def _path(bucket: str) -> str:
    return f"/pools/default/buckets/{quote(bucket, safe='')}"


def _nodes(call: Call, config: ClusterConfig) -> list[dict[str, Any]]:
    return [_node(call, node) for node in config.nodes]


def _node(call: Call, member: ConfigNode) -> dict[str, Any]:
    # A config that was set from outside may omit the host. It is then the host that the client has used.
    host = member.host or call.request.url.hostname or ""
    http_port, https_port = member.http_port(tls=False), member.http_port(tls=True)
    ports = {"direct": member.kv_port(tls=False) or member.kv_port(tls=True), "httpsMgmt": https_port}
    node = {
        "hostname": join_host_port(host, http_port or https_port),
        # The C++ client ends the whole process if this, the system or the version is missing.
        "otpNode": f"ns_1@{host}",
        "os": _SYSTEM,
        "ports": {name: port for name, port in ports.items() if port is not None},
        "services": ["kv"],
        "version": call.node.server_version,
        "clusterCompatibility": _compatibility(call.node.server_version),
        "clusterMembership": "active",
        "recoveryType": "none",
        "status": "healthy",
    }
    if member.is_this_node:
        # A number as a string, as in Couchbase: gocbcore can't read it otherwise.
        node |= {"thisNode": True, "uptime": str(int(call.node.uptime_s()))}
    return node


def _compatibility(version: str) -> int:
    """The major and the minor version in one number, with 16 bits each."""
    major, minor, *_ = version.split(".")
    return int(major) << 16 | int(minor)
