"""`python -m handbook`, which `make docs` runs."""

from __future__ import annotations

from handbook.pages import filled, pages
from handbook.size import lower_limits

for page in pages():
    old = page.read_text(encoding="utf-8")
    new = filled(old)
    if new != old:
        page.write_text(new, encoding="utf-8")
        print(f"written: {page}")
lower_limits()
