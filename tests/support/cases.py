"""One test for many cases that take no time.

A case of `pytest.mark.parametrize` is a test: it is collected by every worker, set up, reported and sent around, which
takes a thousand times as long as to decode a frame. `each` takes the same arguments and makes one test of all cases.
The one that fails is named in its error. Fixtures are shared by all cases, so they must not depend on each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test."""
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [_values(case, len(wanted)) for case in cases]
    assert values, "a test without cases says nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def all_cases(**fixtures: Any) -> None:
            for case in values:
                arguments = dict(zip(wanted, case, strict=True))
                try:
                    test(**fixtures, **arguments)
                except Exception as error:
                    error.add_note(f"The case is {', '.join(f'{name}={value!r}' for name, value in arguments.items())}")
                    raise

        all_cases.__name__, all_cases.__doc__, all_cases.__module__ = test.__name__, test.__doc__, test.__module__
        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        all_cases.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return all_cases

    return decorate


def _values(case: Any, count: int) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        return tuple(case.values)
    return (case,) if count == 1 else tuple(case)
