"""What the bucket of the demo holds."""

from __future__ import annotations

SCOPE = "shop"
COLLECTIONS = ("customers", "orders", "products")
