"""What else may be served on the node's HTTP port: routes from outside, which bring their own rules for who may ask.

The node does not know what they are. Whoever starts the node hands them in (`cli.serve` does so with the dashboard).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.routing import BaseRoute

from headwater.node.http.logins import Logins


class Extension(Protocol):
    """Routes, and what has to run beside them."""

    @property
    def home(self) -> str:
        """The path that a browser is sent to from `/`."""
        ...

    @property
    def routes(self) -> Sequence[BaseRoute]: ...

    def prepare(self) -> None:
        """Do beforehand what takes long. Called in a thread, before `start`."""
        ...

    def start(self) -> None:
        """The node serves from now on. Called in its event loop."""
        ...

    def close(self) -> None:
        """The node stops: end what would never end by itself."""
        ...


MakeExtension = Callable[[Logins], Extension]
