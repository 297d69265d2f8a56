"""SRV lookups in a new interpreter."""

from __future__ import annotations

import subprocess
import sys


def test_the_library_is_imported_only_for_a_lookup() -> None:
    """It would cost every Spark worker its time."""
    program = (
        "import sys, headwater, headwater.client.bootstrap\n"
        "from headwater.client.connection_string import ConnectionString\n"
        "from headwater.client.connection_string import find_hosts\n"
        "find_hosts(ConnectionString.parse('couchbase://127.0.0.1/b'))\n"
        "sys.exit('dns' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
