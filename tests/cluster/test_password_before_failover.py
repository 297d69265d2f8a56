"""The admin's password changes, then a node is lost: when it comes back, the others let it in and tell it so."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from headwater.cli import main
from headwater.cluster.coordinator import Coordinator
from headwater.cluster.nodes import NodePort
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.sasl import Credentials
from support.clusters import ClusterProcesses
from support.node_process import PASSWORD, USER

NEW_PASSWORD = "another secret for tests"
LOST = 2
HEARD_S_MAX = 30.0


async def fail_over(processes: ClusterProcesses) -> None:
    coordinator = Coordinator(
        [processes.nodes[0].address], replace(processes.login, credentials=Credentials(USER, NEW_PASSWORD))
    )
    try:
        await coordinator.failover([processes.names[LOST]])
    finally:
        coordinator.close()


async def active_on(port: NodePort) -> int:
    return sum(copy.state == VBucketState.ACTIVE for copy in (await port.copies()).values())


async def wait_until_it_has_nothing_active(processes: ClusterProcesses) -> None:
    # Started with --user and --password, it has the admin's old password again. That is its own business.
    port = NodePort(processes.nodes[LOST].address, processes.login)
    give_up_s = time.monotonic() + HEARD_S_MAX
    try:
        while active := await active_on(port):
            assert time.monotonic() < give_up_s, f"{active} vbuckets are active on two nodes"
            await asyncio.sleep(0.1)
    finally:
        port.close()


def test_a_lost_node_hears_that_it_is_out(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, vbuckets=8) as processes:

        async def form() -> None:
            async with processes.coordinator(0, 1, 2) as coordinator:
                await coordinator.init(replicas=1)

        asyncio.run(form())
        processes.nodes[LOST].kill()
        changed = CliRunner().invoke(
            main,
            ["users", "change", processes.url(0), USER, "--new-password", NEW_PASSWORD],
            env={"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD},
        )
        assert (changed.exit_code, changed.stdout) == (1, f"changed {USER}\n"), changed.output
        assert f"not on {processes.names[LOST]}" in changed.stderr
        asyncio.run(fail_over(processes))
        processes.nodes[LOST].start()
        asyncio.run(wait_until_it_has_nothing_active(processes))
