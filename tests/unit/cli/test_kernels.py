"""`headwater kernels` compiles what there is, and the second time it only loads it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from headwater.cli import main
from headwater.kernels.machine_code import are_compiled, code_folder


def test_the_folder_has_the_machine_code_of_all_parts() -> None:
    result = CliRunner().invoke(main, ["kernels", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["parts"] == ["client", "node", "landing", "Spark"]
    assert Path(told["folder"]) == code_folder()
    kept = " ".join(path.name for path in code_folder().iterdir())
    for kernel in ("set_frames._scan", "frame_runs._count_runs", "search.find_changes"):
        assert kernel in kept
    assert are_compiled("headwater.store", "headwater.node")
    assert CliRunner().invoke(main, ["kernels"]).stdout.startswith("compiled for client, node, landing, Spark in ")
