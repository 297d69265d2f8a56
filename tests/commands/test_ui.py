"""`headwater ui` as a shell runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from support.forked_program import HEADWATER, start_program
from support.lake_model import SmallLake


def test_no_spark_is_loaded() -> None:
    program = "import sys, headwater.cli.ui; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_lake_at_rest_is_shown_until_ctrl_c(tmp_path: Path) -> None:
    small = SmallLake(tmp_path / "lake")
    small.write(0, "a")
    small.land()
    command = (*HEADWATER, "ui", str(small.directory), "--listen", "0")
    with start_program(*command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        said = running.stderr.readline()
        address = re.search(r"is shown at (http://127\.0\.0\.1:\d+/ui/)$", said)
        assert address is not None, said
        shown = httpx.get(f"{address[1]}api/state").json()
        assert (shown["landing"]["state"], shown["lake"]["documents"]) == ("unknown", 1)
        # Nothing is kept open: the page can be asked while the program ends.
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
        assert running.stderr.read() == ""
