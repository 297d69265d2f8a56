"""`python -m handbook`: what `make docs` runs."""

from __future__ import annotations

from handbook.pages import filled, pages

for page in pages():
    old = page.read_text(encoding="utf-8")
    new = filled(old)
    if new != old:
        page.write_text(new, encoding="utf-8")
        print(f"written: {page}")
