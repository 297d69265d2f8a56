"""What a command that was invoked has printed, or said of why it could not."""

from __future__ import annotations

from click.testing import Result


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def sentence(result: Result) -> str:
    """The one sentence that was said, without the word in front."""
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")
