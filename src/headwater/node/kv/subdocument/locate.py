"""Where a path leads in a document."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from headwater.node.kv.subdocument.failure import SubdocFailure
from headwater.node.kv.subdocument.json_text import Span, elements, members, root
from headwater.node.kv.subdocument.path import LAST, Component, Path
from headwater.protocol.status import Status


class Place(NamedTuple):
    """What a path leads to, or how far it leads."""

    value: Span | None
    """None where the path does not exist."""

    container: Span
    """The object or array around the value; where there is none, the last one on the path that exists."""

    components_found: int


def locate(text: str, path: Path) -> Place:
    container = value = root(text)
    for components_found, component in enumerate(path):
        container, child = value, _child(text, value, component)
        if child is None:
            return Place(None, container, components_found)
        value = child
    return Place(value, container, len(path))


def _child(text: str, container: Span, component: Component) -> Span | None:
    if text[container.start] != ("{" if isinstance(component, str) else "["):
        raise SubdocFailure(Status.SUBDOC_PATH_MISMATCH)
    child = None
    if isinstance(component, str):
        # Where a name stands twice, the last one counts, as it does for those who parse the whole document.
        for member in members(text, container.start):
            if member.name == component:
                child = member.value
    elif component == LAST:
        for element in elements(text, container.start):
            child = element
    else:
        child = next(islice(elements(text, container.start), component, None), None)
    return child
