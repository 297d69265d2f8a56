"""What could not be put in a format, for what is said at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from headwater.cli.escaping import escaped_bytes
from headwater.counted import counted


@dataclass(slots=True)
class LeftOut:
    """Counts by reason, with one key for each."""

    documents: int = 0
    _reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, reason: str, keys: pa.Array) -> None:
        count, example = self._reasons.get(reason, (0, ""))
        self.documents += len(keys)
        self._reasons[reason] = count + len(keys), example or _shown(keys[0].as_py())

    def reasons(self) -> dict[str, int]:
        return {reason: count for reason, (count, _) in self._reasons.items()}

    def sentences(self) -> Iterator[str]:
        for reason, (count, example) in self._reasons.items():
            yield f"{counted(count, 'document')} left out, such as {example}: {reason}"


def _shown(key: bytes) -> str:
    return f"'{escaped_bytes(key)}'"
