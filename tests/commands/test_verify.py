"""headwater verify as a shell runs it."""

from __future__ import annotations

import subprocess
import sys


def test_no_spark_is_loaded_unless_it_is_asked_for() -> None:
    """Loading it takes as long as comparing a million documents."""
    program = "import sys, headwater.cli.verify; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
