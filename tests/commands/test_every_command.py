"""What all commands have in common: help with an example, errors in one sentence, exit codes, completion."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from handbook.command_sections import all_commands

from headwater.cli import COMMANDS, load_command, main, summary_of
from support.cases import case
from support.forked_program import run_program

ALL = dict(all_commands())
LEAVES = {path: command for path, command in ALL.items() if not isinstance(command, click.Group)}
URL = "couchbase://127.0.0.1:1/travel"
NOWHERE = "Error: 127.0.0.1:1 can't be reached"

BAD_INPUT: dict[str, list[tuple[list[str], int, str]]] = {
    "headwater cluster add": [([URL, "127.0.0.1:2"], 1, "can't be reached"), ([URL], 2, "Missing argument 'NODE'")],
    "headwater cluster failover": [([URL, "127.0.0.1:2"], 1, "can't be reached")],
    "headwater cluster init": [([URL], 1, "can't be reached"), ([URL, "--replicas", "9"], 2, "--replicas")],
    "headwater cluster rebalance": [([URL], 1, "can't be reached")],
    "headwater cluster remove": [([URL, "127.0.0.1:2"], 1, "can't be reached")],
    "headwater cluster renew-login": [([URL], 1, "can't be reached")],
    "headwater cluster restart-node": [
        ([".", "h:1"], 1, "not the data folder of"),
        (["."], 2, "Missing argument 'NODE"),
    ],
    "headwater cluster status": [([URL], 1, "can't be reached"), (["couchbase://h"], 1, "names no bucket")],
    "headwater buckets create": [([URL, "a"], 1, NOWHERE), ([URL], 2, "Missing argument 'NAME'")],
    "headwater buckets drop": [([URL, "a"], 1, NOWHERE)],
    "headwater buckets flush": [([URL, "a"], 1, NOWHERE)],
    "headwater buckets list": [([URL], 1, NOWHERE)],
    "headwater buckets update": [([URL, "a", "--max-ttl", "1"], 1, NOWHERE), ([URL, "a"], 2, "Give what is to change")],
    "headwater collections create": [([URL, "a"], 1, NOWHERE), ([URL, "a.b.c"], 2, "not a scope")],
    "headwater collections drop": [([URL, "a"], 1, NOWHERE)],
    "headwater collections update": [
        ([URL, "a.b", "--max-ttl", "1"], 1, NOWHERE),
        ([URL, "a.b"], 2, "Give what is to change"),
    ],
    "headwater collections list": [([URL], 1, NOWHERE), (["http://127.0.0.1"], 1, "the URL names no bucket")],
    "headwater check": [(["no-such-folder"], 2, "does not exist"), (["."], 2, "no folder named buckets")],
    "headwater decode": [(["no-such-file"], 2, "No such file"), (["-", "--input-format", "pcap"], 1, "Error: ")],
    "headwater doctor": [(["localhost"], 1, "is not a URL"), (["--port", "0"], 2, "--port")],
    "headwater drill rollback": [([URL, "--vbucket", "1", "--to", "1"], 1, NOWHERE), ([URL], 2, "Missing option")],
    "headwater drill hold-replicas": [([URL], 1, NOWHERE), ([], 2, "Missing argument 'URL'")],
    "headwater drill cut-connections": [([URL], 1, NOWHERE)],
    "headwater drill release-replicas": [([URL], 1, NOWHERE)],
    "headwater export": [([URL, "--into", "out"], 1, NOWHERE), ([URL], 2, "Missing option '--into'")],
    "headwater health": [([URL], 1, NOWHERE), (["no-such-lake"], 1, "does not contain the tables of a landing")],
    "headwater judge": [([], 2, "Give the command of the consumer"), (["--nodes", "1"], 2, "Give 2 to 5")],
    "headwater kernels": [(["now"], 2, "Got unexpected extra argument (now)")],
    "headwater land": [(["localhost", "--into", "lake"], 1, "is not a URL")],
    "headwater load": [([URL, "--generate", "1"], 1, NOWHERE), ([URL], 2, "Give either FILE or --generate N")],
    "headwater repair": [(["localhost", "lake"], 1, "is not a URL"), ([], 2, "Missing argument")],
    "headwater replicate": [
        (["--from", URL, "--to", URL.replace(":1/", ":2/")], 1, "can't be reached"),
        (["--from", URL, "--to", URL], 1, "are the same bucket of the same node"),
        ([], 2, "Missing option"),
    ],
    "headwater serve": [(["--data", "data", "--vbuckets", "3"], 1, "take a power of two")],
    "headwater sim": [(["--no-such-option"], 2, "No such option")],
    "headwater tail": [([URL, "--to", "now"], 1, NOWHERE), ([URL, "--limit", "0"], 2, "--limit")],
    "headwater ui": [
        (["no-such-lake"], 1, "no-such-lake does not contain the tables of a landing"),
        (["lake", "--listen", "0.0.0.0:8080"], 1, "without a token the page is not served"),
    ],
    "headwater users add": [
        ([URL, "kim", "--role", "admin", "--new-password", "violets"], 1, NOWHERE),
        ([URL, "kim"], 2, "give --role or --group"),
    ],
    "headwater users change": [([URL, "kim", "--role", "admin"], 1, NOWHERE), ([URL], 2, "Missing argument 'NAME'")],
    "headwater users list-groups": [([URL], 1, NOWHERE)],
    "headwater users put-group": [
        ([URL, "readers", "--role", "data_reader"], 1, NOWHERE),
        ([URL], 2, "Missing argument 'NAME'"),
    ],
    "headwater users remove-group": [([URL, "readers"], 1, NOWHERE)],
    "headwater users list": [([URL], 1, NOWHERE), (["http://h/a/b"], 1, "more than a bucket")],
    "headwater users remove": [([URL, "kim"], 1, NOWHERE)],
    "headwater verify": [(["localhost", "lake"], 1, "is not a URL")],
}
"""By command: arguments, the exit code, and a part of what is said. A new command needs an entry."""


def run(*arguments: str, **variables: str) -> Result:
    login = {"HEADWATER_USER": "me", "HEADWATER_PASSWORD": "secret"}
    return CliRunner().invoke(main, arguments, env={**login, **variables}, input="", prog_name="headwater")


@pytest.mark.parametrize("path", ALL)
def test_help_has_an_example(path: str) -> None:
    result = run(*path.split()[1:], "--help")
    assert result.exit_code == 0, result.output
    assert re.search(r"Examples?:\s", result.output)
    assert path in result.output.partition("Example")[2], "the example shows the command itself"
    first = (ALL[path].help or "").partition("\n")[0]
    assert first.endswith("."), "its first line is a sentence"


@pytest.mark.parametrize("path", ALL)
def test_examples_can_be_copied_from_a_terminal_of_80_columns(path: str) -> None:
    examples = inspect.cleandoc(ALL[path].help or "").partition("Example")[2].splitlines()[1:]
    result = run(*path.split()[1:], "--help", COLUMNS="80")
    shown = [line.strip() for line in result.output.splitlines()]
    assert [line for line in examples if line.strip() not in shown] == []


@pytest.mark.parametrize("path", LEAVES)
def test_an_option_that_is_none(path: str) -> None:
    result = run(*path.split()[1:], "--no-such-option")
    assert (result.exit_code, result.stdout) == (2, "")
    [said] = result.stderr.splitlines()
    assert said.startswith("Error: No such option '--no-such-option'")
    assert said.endswith(f" See {path} --help")


@pytest.mark.parametrize(
    ("path", "arguments", "exit_code", "said"), [(path, *case) for path, cases in BAD_INPUT.items() for case in cases]
)
def test_bad_input_gives_one_sentence(
    path: str, arguments: list[str], exit_code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*path.split()[1:], *arguments)
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.output
    first, *others = result.stderr.splitlines()
    assert first.startswith("Error: ")
    assert said in first
    assert [line for line in others if line != "0 documents were written"] == []


def test_no_command_is_left_out() -> None:
    assert LEAVES.keys() == BAD_INPUT.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_a_command_says_about_itself(name: str) -> None:
    assert (load_command(name).help or "").partition("\n")[0] == summary_of(name)
    assert name in run("--help").output


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom headwater.cli import main\n"
        "print(CliRunner().invoke(main, ['--help']).exit_code)\n"
        "print([name for name in ('pyspark', 'lmdb', 'numba', 'pyarrow', 'uvloop') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n[]\n"


def test_an_unknown_command() -> None:
    result = run("nonsense")
    assert (result.exit_code, result.stderr) == (2, "Error: No such command 'nonsense'. See headwater --help\n")


# --- completion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_a_shell(shell: str) -> None:
    result = run("--completion", shell)
    assert result.exit_code == 0
    assert "_HEADWATER_COMPLETE" in result.stdout
    program = shutil.which(shell)
    if program is not None:
        checked = subprocess.run([program, "-n", "/dev/stdin"], input=result.stdout, text=True, check=False)
        assert checked.returncode == 0


def test_a_shell_that_has_none() -> None:
    result = run("--completion", "tcsh")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("See headwater --help\n")


@case("headwater colle", ["plain,collections"])
@case("headwater collections cr", ["plain,create"])
@case("headwater load --for", ["plain,--format"])
@case("headwater load --format p", ["plain,parquet"])
def test_what_bash_completes(words: str, expected: list[str]) -> None:
    variables = {
        "_HEADWATER_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "PATH": os.environ["PATH"],
    }
    done = run_program("-c", "from headwater.cli import main; main(prog_name='headwater')", env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
