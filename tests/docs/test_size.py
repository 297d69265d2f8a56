"""The code is not larger than its limits say."""

from __future__ import annotations

from handbook.size import limits, measured


def test_no_limit_on_the_size_of_the_code_is_exceeded() -> None:
    allowed = limits()
    too_large = {name: found for name, found in measured().items() if found > allowed.get(name, 0)}
    assert too_large == {}, "simplify, or raise the limit in docs/internals/size.toml and say why there"
