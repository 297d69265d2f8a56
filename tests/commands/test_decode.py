"""headwater decode as a shell runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import DcpNoop
from support.forked_program import HEADWATER, start_program

NOOP = DcpNoop(opaque=7).encode()
DECODE = (*HEADWATER, "decode")


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    file = tmp_path / "many.bin"
    file.write_bytes(NOOP * 2000)
    for arguments in ([], ["--json"]):
        process = start_program(*DECODE, *arguments, str(file), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline()
        process.stdout.close()
        complaint = process.stderr.read()
        process.stderr.close()
        assert (process.wait(timeout=60), complaint) == (0, b"")


def test_a_terminal_gets_colours() -> None:
    ours, theirs = os.openpty()
    process = start_program(
        *DECODE,
        *("--no-grid", "-"),
        stdin=subprocess.PIPE,
        stdout=theirs,
        env={"TERM": "xterm-256color", "COLUMNS": "20"},
    )
    os.close(theirs)
    process.communicate(NOOP, timeout=60)
    printed = b""
    with suppress(OSError):  # how Linux says that the other side is closed
        while chunk := os.read(ours, 4096):
            printed += chunk
    os.close(ours)
    assert process.returncode == 0
    # In colour, and not wrapped at the width of the terminal.
    assert printed.startswith(b"\x1b[1;36m#1  byte 0  DCP_NOOP command  magic 0x80 REQUEST\x1b[0m\r\n")


def test_a_pipe_gets_no_colours_and_a_narrow_encoding_loses_nothing() -> None:
    mutation = Mutation(seqno=1, rev_seqno=1, key="schlüssel".encode()).encode()
    """Python reads the encoding when it starts."""
    result = subprocess.run(
        [sys.executable, *DECODE, "--no-grid", "-"],
        input=mutation,
        capture_output=True,
        check=True,
        timeout=60,
        env={"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "", "COLUMNS": "20"},
    )
    assert b"\x1b" not in result.stdout
    assert rb'"schl\xfcssel"' in result.stdout
