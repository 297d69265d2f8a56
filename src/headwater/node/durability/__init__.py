"""Durable writes on the active node: who has acknowledged what, when a majority has, and what writers are told."""
