"""`headwater judge`: run any consumer of the protocol against a failing cluster, and check what it has at the end."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import rich_click as click

from headwater.cli.options import GivenOptions, options_from, parse_time
from headwater.errors import HeadwaterError, InvalidInput
from headwater.judge.plan import Shape, make_plan
from headwater.judge.run import judge_seed
from headwater.options import option
from headwater.phrases import counted
from headwater.testing.nursery import NodeFailed, Nursery


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """The options of the command, except those of `Shape`."""

    seed: int = option("The first seed.", 1, least=0)
    seeds: int = option("How many seeds to run, starting at N.", 1, least=1, metavar="K")
    patience_s: float = option(
        "How long the consumer may write nothing at the end before it counts as stuck.",
        "10s",
        cli_name="--patience",
        cli_type=parse_time,
        metavar="TIME",
    )
    only_plan: bool = option("Print what would be done, and do nothing.", False, cli_name="--plan")
    keep: Path | None = option(
        "Keep what the consumer printed and the logs of the nodes here, for each seed that is not equal.",
        metavar="DIRECTORY",
        cli_type=click.Path(file_okay=False, path_type=Path),
    )
    verbose: bool = option("Print each step as it is done, on standard error.", False, cli_also=("-v",))
    as_json: bool = option("Print a line of JSON for each seed.", False, cli_name="--json")


class JudgeFailed(click.ClickException):
    """The judge could not reach a verdict on the consumer."""

    exit_code = 4


@click.command(context_settings={"allow_interspersed_args": False})
@options_from(JudgeOptions, Shape)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def judge(given: GivenOptions, command: tuple[str, ...]) -> None:
    """Run a consumer against a failing cluster, and check what it has.

    COMMAND is any program that follows a bucket from the beginning and prints a line of JSON for each change: {"op":
    "set", "key": …, "seqno": …, "value": …}, {"op": "delete", "key": …, "seqno": …}, or {"op": "rollback", "vbucket":
    …, "seqno": …}, which undoes everything above this seqno. The program gets the address of the cluster in the
    variables HEADWATER_CONNECTION, HEADWATER_BUCKET, HEADWATER_USER and HEADWATER_PASSWORD, and in its arguments for
    the placeholders {connection}, {bucket}, {url}, {user} and {password}. {state} is a directory for its checkpoints.

    The nodes are real and listen on loopback. A seed determines the writes, failovers with lost writes, rollbacks,
    moves of vbuckets, cut connections, and killed and silent nodes. At the end, the consumer must have exactly the
    documents of the bucket. The exit code is 0 if it has, 1 if it differs, 2 for an invalid command line, 3 if it
    exits, prints an invalid line or gets stuck, and 4 if the judge itself fails, for example because a node can't be
    started. With several seeds, a difference takes precedence.

    \b
    Examples:
      headwater judge -- headwater tail '{url}' --json
      headwater judge --seeds 100 --json -- python my_consumer.py
      headwater judge --seed 17 --verbose -- ./my-consumer --hosts '{connection}'
    """
    asked = given.make(JudgeOptions)
    numbers = range(asked.seed, asked.seed + asked.seeds)
    try:
        shape = given.make(Shape)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    if asked.only_plan:
        for number in numbers:
            for line in make_plan(number, shape).lines():
                click.echo(f"seed {number}: {line}")
        return
    _check(command, asked.keep, numbers)
    # Coordinators log nodes that the judge itself has killed.
    logging.getLogger("headwater").addHandler(logging.NullHandler())
    bad = []
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-judge-") as work, Nursery(Path(work)) as nursery:
            for number in numbers:
                folder = (asked.keep or Path(work)) / f"seed-{number}"
                folder.mkdir(parents=True)
                plan = make_plan(number, shape)
                report = partial(click.echo, err=True) if asked.verbose else str
                verdict = judge_seed(nursery, folder, plan, command, patience_s=asked.patience_s, report=report)
                if verdict.exit_code:
                    bad.append(verdict)
                if asked.keep is None or not verdict.exit_code:
                    shutil.rmtree(folder)
                if asked.as_json:
                    click.echo(json.dumps(asdict(verdict)))
                elif verdict.exit_code or asked.seeds == 1:
                    click.echo("\n".join(verdict.lines()))
                sys.stdout.flush()
    except (HeadwaterError, NodeFailed) as error:
        raise JudgeFailed(str(error)) from error
    if bad and not asked.as_json:
        replayed = f"headwater judge --seed {bad[0].seed} {shape.options()}-- {shlex.join(command)}"
        click.echo(f"replay seed {bad[0].seed} with: {replayed}")
    if asked.seeds > 1 and not asked.as_json:
        every = counted(asked.seeds, "seed")
        click.echo(f"{len(bad)} of {every} failed" if bad else f"all {every} are equal")
    sys.exit(min((verdict.exit_code for verdict in bad), default=0))


def _check(command: tuple[str, ...], keep: Path | None, seeds: range) -> None:
    if not command:
        raise click.UsageError("Give the command of the consumer behind --")
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"There is no program {command[0]!r}. Give the command of the consumer behind --")
    old = [f"seed-{number}" for number in seeds if keep is not None and (keep / f"seed-{number}").exists()]
    if old:
        raise click.UsageError(f"{keep} has {old[0]} of an earlier run. Give another directory to --keep")
