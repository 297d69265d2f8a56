"""`format("dcp")` where DNS lists the hosts: the planner and the tasks, each in a process of its own, find them."""

from __future__ import annotations

from pyspark.sql import SparkSession

from support.landings import SourceBucket
from support.machine import DnsServer

NAME = "cb.example.com"


def test_planner_and_tasks_find_the_hosts(spark: SparkSession, bucket: SourceBucket) -> None:
    keys = [f"key-{number}".encode() for number in range(20)]
    bucket.put_each(dict.fromkeys(keys, b"{}"))
    with DnsServer({f"_couchbase._tcp.{NAME}": [(0, 0, bucket.node.port, "localhost.")]}) as server:
        url = f"couchbase://{NAME}/{bucket.name}?{server.options}"
        rows = spark.read.format("dcp").options(**{**bucket.options, "url": url}).load().collect()
    assert sorted(row.key.encode() for row in rows if row.op == "mutation") == sorted(keys)
    assert set(server.questions) == {f"_couchbase._tcp.{NAME}"}
