"""What the bucket of the demo holds: the orders of a shop. The same seed gives the same documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

SCOPE = "shop"
COLLECTION = f"{SCOPE}.orders"

_CUSTOMERS = ("Ada", "Amara", "Chen", "Elif", "Emmy", "Fatima", "Grace", "Hedy", "Jean", "Kateryna", "Radia", "Sofia")
_CITIES = ("Accra", "Bergen", "Cork", "Delft", "Graz", "Hanoi", "Kyoto", "Lyon", "Porto", "Quito", "Riga", "Zurich")
_STATUSES = ("open", "paid", "sent")


def key_of(number: int) -> str:
    return f"order::{number}"


def order(number: int, random: Random) -> dict[str, Any]:
    """An order as it is now: its number stays, what else there is changes with the dice."""
    return {
        "id": number,
        "customer": random.choice(_CUSTOMERS),
        "city": random.choice(_CITIES),
        "status": random.choice(_STATUSES),
        "total": random.randrange(20_000) / 100,
    }


def json_lines(count: int, seed: int) -> Iterator[str]:
    """The orders, numbered from 1, as `headwater load` reads them."""
    random = Random(seed)
    return (json.dumps(order(number, random)) + "\n" for number in range(1, count + 1))
