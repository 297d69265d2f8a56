"""`headwater sim`: whole clusters in one process, with a simulated clock, network and disk, replayed from a seed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headwater.cli.options import GivenOptions, options_from
from headwater.cli.output import click
from headwater.options import option
from headwater.phrases import counted
from headwater.sim.consumers import LandingMutant, Mutant
from headwater.sim.run import SeedReport, run_seed

_SHOWN_COMPLAINTS = 10
_MUTANTS: dict[str, Mutant | LandingMutant] = {str(mutant): mutant for mutant in (*Mutant, *LandingMutant)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """The options of the command."""

    seed: int = option("The first seed.", 0, least=0)
    seeds: int = option("How many seeds to run, starting at N.", 1, least=1, metavar="K")
    trace: bool = option("Print the events, line by line. For a single seed.", False)
    mutant: Mutant | LandingMutant | None = option(
        f"Make the consumers do one thing wrong, to check that it is detected: {', '.join(_MUTANTS)}.",
        choices=_MUTANTS,
        metavar="NAME",
    )
    jobs: int | None = option("Number of processes. The default is one per core.", least=1, metavar="J")
    as_json: bool = option("Print a line of JSON for each seed.", False, cli_name="--json")


@click.command()
@options_from(SimOptions)
def sim(given: GivenOptions) -> None:
    """Run simulated clusters, and check the results.

    Each seed is a separate run with crashing nodes, cut links, failovers, rebalances and drills, while writers write
    and consumers follow. At the end, no acknowledged write may be lost, and every copy and every consumer must have
    exactly what is stored. A seed always does the same, so a failing one can be replayed and examined. The exit code is
    1 if any seed fails.

    \b
    Examples:
      headwater sim --seed 42 --trace      # replay one and print what happened
      headwater sim --seed 0 --seeds 500   # look for one that fails
      headwater sim --seeds 100 --mutant drops-rollbacks
    """
    asked = given.make(SimOptions)
    seeds, is_shown = asked.seeds, asked.seeds > 1 and not asked.as_json
    if asked.trace and seeds > 1:
        raise click.UsageError("--trace is for one seed: leave --seeds out")
    reports = _reports(range(asked.seed, asked.seed + seeds), asked)
    failed: list[SeedReport] = []
    for report in _shown(reports, total=seeds, is_shown=is_shown):
        if asked.as_json:
            click.echo(json.dumps(_members(report)))
        elif seeds == 1:
            _print(report)
        elif not report.is_good:
            _print_failure(report)
        if not report.is_good:
            failed.append(report)
    if is_shown:
        _sum_up(failed, seeds)
    sys.exit(1 if failed else 0)


def _reports(numbers: range, asked: SimOptions) -> Iterator[SeedReport]:
    if len(numbers) == 1 or asked.jobs == 1:
        for number in numbers:
            yield run_seed(number, mutant=asked.mutant, keeps_trace=asked.trace)
        return
    # Only this process handles Ctrl-C: the workers would each print it, and a pool waits for the seeds in progress.
    ignored = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(asked.jobs or os.cpu_count(), initializer=signal.signal, initargs=ignored)
    try:
        yield from pool.map(partial(run_seed, mutant=asked.mutant), numbers)
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _shown(reports: Iterator[SeedReport], *, total: int, is_shown: bool) -> Iterator[SeedReport]:
    """Yield the same reports, with a progress bar on standard error."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield from reports
        return
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=total)
        for report in reports:
            progress.advance(task)
            yield report


def _print(report: SeedReport) -> None:
    for line in report.lines:
        click.echo(line)
    for what, count in sorted(report.counts.items()):
        click.echo(f"{count:>8} {what}")
    click.echo(f"{report.simulated_s:.1f} simulated seconds in {report.steps} steps, digest {report.digest}")
    if report.is_good:
        click.echo(f"seed {report.seed} is good")
    else:
        _print_failure(report)


def _print_failure(report: SeedReport) -> None:
    click.echo(f"seed {report.seed} fails:")
    for complaint in report.complaints[:_SHOWN_COMPLAINTS]:
        click.echo(f"  {complaint}")
    if len(report.complaints) > _SHOWN_COMPLAINTS:
        click.echo(f"  and {len(report.complaints) - _SHOWN_COMPLAINTS} more")


def _sum_up(failed: list[SeedReport], seeds: int) -> None:
    if not failed:
        click.echo(f"all {counted(seeds, 'seed')} are good")
        return
    click.echo(f"{len(failed)} of {counted(seeds, 'seed')} failed: {', '.join(str(report.seed) for report in failed)}")
    click.echo(f"replay one with: headwater sim --seed {failed[0].seed} --trace")


def _members(report: SeedReport) -> dict[str, Any]:
    return {
        "seed": report.seed,
        "good": report.is_good,
        "complaints": list(report.complaints),
        "digest": report.digest,
        "simulated_s": round(report.simulated_s, 3),
        "steps": report.steps,
        "counts": report.counts,
    }
