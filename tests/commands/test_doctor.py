"""`headwater doctor` on a machine where everything is wrong, and on buckets and lakes that can't be used."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from headwater.cli import main
from headwater.client.blocking_bucket import bootstrap
from headwater.client.settings import ClientSettings
from headwater.lake.lake import Lake
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import VBucketId
from support.node_process import PASSWORD, USER, StartNode


def doctor(*arguments: str, user: str = USER, password: str = PASSWORD) -> dict[str, dict[str, Any]]:
    # To start Java each time would take longer than all else.
    variables = {"HEADWATER_USER": user, "HEADWATER_PASSWORD": password, "JAVA_HOME": "/no-java"}
    result = CliRunner().invoke(main, ["doctor", *arguments, "--json"], env=variables)
    said = json.loads(result.stdout)
    assert result.exit_code == (0 if said["ok"] else 1)
    return {row["check"]: row for row in said["checks"]}


def test_a_machine_where_everything_is_wrong(tmp_path: Path) -> None:
    """A new interpreter: where machine code is kept is decided when it starts."""
    (tmp_path / "file").touch()
    broken = {
        "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
        "JAVA_HOME": str(tmp_path / "no-java"),
        "PYSPARK_PYTHON": str(tmp_path / "no-python"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "headwater", "doctor", "couchbase://127.0.0.1:1/default", "file", "--json"]
        command += ["--data", "file/data", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | broken
        )
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads(done.stdout)
    states = {row["check"]: row["state"] for row in said["checks"]}
    assert states == {
        "Python": "ok", "libraries": "ok", "libraries of the node": "ok", "libraries of Spark": "ok",
        "kernels": "warning", "Java": "failed", "Spark's workers": "failed", "host name": "ok", "ports": "failed",
        "data folder": "failed", "bucket": "failed", "rights": "unknown", "lake": "failed",
    }  # fmt: skip
    assert all(row["do"] for row in said["checks"] if row["state"] in ("warning", "failed"))


def test_a_bucket_and_who_may_stream_it(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4")
    url = f"{node.url}/default"
    port, http_port = node.address.port, node.http_url.rpartition(":")[2]
    rows = doctor(url, "--port", str(port), "--http-port", http_port)
    assert rows["ports"]["found"] == f"a node answers on port {port}; a node answers on port {http_port}"
    assert rows["bucket"]["found"].startswith("default with 4 vbuckets on 1 node, ")
    assert rows["rights"]["found"].startswith("may stream all 4 vbuckets")

    rows = doctor(url, password="wrong")
    assert (rows["bucket"]["state"], rows["rights"]["state"]) == ("failed", "unknown")
    assert {rows["ports"]["state"], rows["data folder"]["state"]} == {"skipped"}, "a client needs neither"
    assert doctor(f"{node.url}/other")["bucket"]["do"] == "Check the bucket's name, and give the user a role on it"

    add = ["users", "add", url, "kim", "--role", "data_reader[default]", "--new-password", "violets"]
    login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
    assert CliRunner().invoke(main, add, env=login).exit_code == 0
    rows = doctor(url, user="kim", password="violets")
    assert (rows["bucket"]["state"], rows["rights"]["state"]) == ("ok", "failed")
    assert rows["rights"]["do"] == "Give the user the role data_dcp_reader on this bucket"


def test_a_vbucket_that_no_node_has(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4")
    with node.connect() as connection:
        connection.request(SetVBucket(vbucket=VBucketId(2), state=VBucketState.DEAD))
    rows = doctor(f"{node.url}/default")
    assert (rows["bucket"]["state"], rows["rights"]["state"]) == ("ok", "failed")
    assert rows["rights"]["found"] == "1 vbucket of 4 has no active node"


def test_a_lake(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--vbuckets", "4")
    url, place = f"{node.url}/default", tmp_path / "lake"
    assert doctor(url, str(place))["lake"]["found"].endswith("no tables are there yet")
    uuid = bootstrap(ClientSettings.make(url, user=USER, password=PASSWORD)).bucket_uuid
    Lake.create(str(place), bucket_uuid=uuid, vbuckets=4)
    assert doctor(url, str(place))["lake"]["found"].endswith("0 tables with 0 documents, of this bucket")
    assert doctor(url, str(place), password="wrong")["lake"]["state"] == "unknown"
    Lake.create(str(tmp_path / "other"), bucket_uuid="0" * 32, vbuckets=4)
    assert "hold the bucket with the uuid" in doctor(url, str(tmp_path / "other"))["lake"]["found"]
    for entry in (place / "changes" / "_delta_log").iterdir():
        entry.write_bytes(b"damaged")
    assert doctor(url, str(place))["lake"]["state"] == "failed"
