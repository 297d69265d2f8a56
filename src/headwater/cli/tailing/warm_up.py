"""Have the kernels of `headwater tail --json` compiled before it is in a hurry."""

from __future__ import annotations

from headwater.client.warm_up import a_batch
from headwater.transfer.change_lines import JsonLines


def warm_up() -> None:
    for no_value in (False, True):
        JsonLines(no_value=no_value).encode(a_batch())
