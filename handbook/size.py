"""The size of the source, which `docs/internals/size.toml` limits. `make docs` lowers the limits.

A change that needs more raises a limit in that file, and gives the reason in a comment. A test compares.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "docs" / "internals" / "size.toml"
SMALL_LINES = 60


def measured() -> dict[str, int]:
    """Return everything that has a limit, by the name of its limit."""
    files = lines_by_file(ROOT / "src")
    packages: Counter[str] = Counter()
    for path, lines in files.items():
        parts = path.relative_to(ROOT / "src").parts
        packages[parts[1] if len(parts) > 2 else "other"] += lines
    return {
        "files": len(files),
        "lines": sum(files.values()),
        "test_lines": sum(lines_by_file(ROOT / "tests").values()),
        "small_files": sum(lines < SMALL_LINES for path, lines in files.items() if path.name != "__init__.py"),
        "import_chain": len(longest_import_chain()),
        **{f"lines.{package}": lines for package, lines in sorted(packages.items())},
    }


def lines_by_file(folder: Path) -> dict[Path, int]:
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(folder.rglob("*.py"))}


def limits() -> dict[str, int]:
    """Return the limits in the file."""
    read = tomllib.loads(LIMITS.read_text(encoding="utf-8"))
    of_packages = read.pop("lines_by_package")
    return {**read, **{f"lines.{package}": lines for package, lines in of_packages.items()}}


def lower_limits() -> None:
    """Lower the limits of everything that is smaller now. Limits that are exceeded stay, for a person to decide."""
    found, text = measured(), LIMITS.read_text(encoding="utf-8")
    for name, limit in limits().items():
        if found.get(name, limit) < limit:
            text = re.sub(rf"(?m)^({name.removeprefix('lines.')} = )\d+", rf"\g<1>{found[name]}", text)
    LIMITS.write_text(text, encoding="utf-8")


@cache
def longest_import_chain() -> list[str]:
    """Return the modules of the longest chain in which each imports the next at import time."""
    trees = {_module_name(path): tree for path, tree in _trees()}
    imports = {module: {*_imported(tree, trees.keys())} for module, tree in trees.items()}
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(imports).static_order():
        longest = max((chains[it] for it in imports[module]), key=len, default=[])
        chains[module] = [module, *longest]
    return max(chains.values(), key=len)


def _imported(tree: ast.Module, modules: Set[str]) -> Iterator[str]:
    """Yield the modules that a module imports when it runs, except imports in functions or for type checkers."""
    for statement in tree.body:
        match statement:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in modules)
            case ast.ImportFrom(module=str(module), names=names) if module in modules:
                named = (f"{module}.{alias.name}" for alias in names)
                yield from (name if name in modules else module for name in named)


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def private_functions() -> tuple[int, int]:
    """Return how many functions and methods have private names, and how many of these their module names once."""
    private = once = 0
    for _, tree in _trees():
        named = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_[^_]", node.name):
                private += 1
                once += named[node.name] == 1
    return private, once


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in lines_by_file(ROOT / "src"):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def report() -> str:
    """Return the figures as a table, for `docs/internals/decisions.md`."""
    sizes, (private, once) = sorted(lines_by_file(ROOT / "src").values()), private_functions()
    rows = {
        "source files": f"{len(sizes):,}",
        "lines of source, of tests": f"{sum(sizes):,}, {measured()['test_lines']:,}",
        "lines a file: median, 90th percentile": f"{median(sizes):.0f}, {quantiles(sizes, n=10)[-1]:.0f}",
        f"files under {SMALL_LINES} lines": f"{sum(size < SMALL_LINES for size in sizes)}",
        "private functions, of which called once": f"{private:,}, {once:,}",
        "longest import chain": f"{len(longest_import_chain())}",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


if __name__ == "__main__":
    print(report())
