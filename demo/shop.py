"""What the bucket of the demo holds: a shop. The same seed gives the same documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

SCOPE = "shop"
SHARES = {"customers": 20, "orders": 70, "products": 10}
"""The collections, and how many of a hundred documents each of them has."""

_FIRST = ("Ada", "Amara", "Chen", "Elif", "Emmy", "Fatima", "Grace", "Hedy", "Jean", "Kateryna", "Radia", "Sofia")
_LAST = ("Bartik", "Costa", "Diaz", "Dubois", "Haddad", "Hopper", "Ivanova", "Kim", "Lovelace", "Okafor", "Sato")
_CITIES = ("Accra", "Bergen", "Cork", "Delft", "Graz", "Hanoi", "Kyoto", "Lyon", "Porto", "Quito", "Riga", "Zurich")
_MADE_OF = ("brass", "copper", "cotton", "glass", "linen", "oak", "slate", "wool")
_THINGS = ("blanket", "bowl", "clock", "kettle", "lamp", "mirror", "shelf", "teapot")
_STATUSES = ("open", "paid", "packed", "sent", "delivered", "returned")


def counts(documents: int) -> dict[str, int]:
    """How many documents each collection gets."""
    return {name: max(1, documents * share // 100) for name, share in SHARES.items()}


def json_lines(name: str, count: int, seed: int) -> Iterator[str]:
    """The documents of a collection, numbered from 1, as `headwater load` reads them."""
    random = Random(f"{seed} {name}")
    return (json.dumps(document(name, number, random)) + "\n" for number in range(1, count + 1))


def document(name: str, number: int, random: Random) -> dict[str, Any]:
    """A document as it is now: its number stays, what else there is changes with the dice."""
    return {"id": number, **_MAKERS[name](random)}


def _customer(random: Random) -> dict[str, Any]:
    first, last = random.choice(_FIRST), random.choice(_LAST)
    email = f"{first}.{last}@example.com".lower()
    return {"name": f"{first} {last}", "email": email, "city": random.choice(_CITIES), "points": _below(random, 5000)}


def _product(random: Random) -> dict[str, Any]:
    name = f"{random.choice(_MADE_OF)} {random.choice(_THINGS)}"
    return {"name": name, "price": _price(random), "stock": _below(random, 300), "sold": _below(random, 9000)}


def _order(random: Random) -> dict[str, Any]:
    lines: list[dict[str, Any]] = [
        {"product": f"products::{1 + _below(random, 1000)}", "quantity": 1 + _below(random, 4), "price": _price(random)}
        for _ in range(1 + _below(random, 3))
    ]
    total = round(sum(line["quantity"] * line["price"] for line in lines), 2)
    customer = f"customers::{1 + _below(random, 1000)}"
    return {"customer": customer, "status": random.choice(_STATUSES), "lines": lines, "total": total}


def _price(random: Random) -> float:
    return _below(random, 20_000) / 100


def _below(random: Random, limit: int) -> int:
    # `randrange` takes three times as long, and there are a lot of documents.
    return int(random.random() * limit)


_MAKERS = {"customers": _customer, "orders": _order, "products": _product}
