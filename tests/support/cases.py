"""One test for many fast cases.

A case of `pytest.mark.parametrize` is a test: every worker collects it, sets it up, reports it and sends it around,
which takes a thousand times as long as decoding a frame. `each` takes the same arguments and makes one test of all
cases; `case` adds one case, for tables written above their test. The error of a test names the case that fails. All
cases share the fixtures, so they must not depend on each other. `case_apart` makes each case a test with its own
fixtures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but in one test."""
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [_values(case, len(wanted)) for case in cases]
    assert values, "a test without cases says nothing"
    return lambda test: _all_cases(test, wanted, values)


def case(*values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a case to a test: the values of its last parameters. Those before them are fixtures."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        cases = getattr(test, "cases", [])
        cases.insert(0, values)
        if len(cases) == 1:
            test = _all_cases(test, list(inspect.signature(test).parameters)[-len(values) :], cases)
            test.cases = cases
        return test

    return decorate


def case_apart(*values: Any, id: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a case as a separate test: the values of its last parameters."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        cases = getattr(test, "cases", [])
        cases.insert(0, pytest.param(*values, id=id))
        if len(cases) == 1:
            test = pytest.mark.parametrize(list(inspect.signature(test).parameters)[-len(values) :], cases)(test)
            test.cases = cases
        return test

    return decorate


def _all_cases(test: Callable[..., None], wanted: list[str], cases: list[tuple[Any, ...]]) -> Callable[..., None]:
    def all_cases(**fixtures: Any) -> None:
        for values in cases:
            arguments = dict(zip(wanted, values, strict=True))
            try:
                test(**fixtures, **arguments)
            except Exception as error:
                error.add_note(f"The case is {', '.join(f'{name}={value!r}' for name, value in arguments.items())}")
                raise

    all_cases.__name__, all_cases.__doc__, all_cases.__module__ = test.__name__, test.__doc__, test.__module__
    signature = inspect.signature(test)
    others = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
    all_cases.__signature__ = signature.replace(parameters=others)
    return all_cases


def _values(case: Any, count: int) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        return tuple(case.values)
    return (case,) if count == 1 else tuple(case)
