"""The page itself: what `web/` was built into, kept in memory."""

from __future__ import annotations

import mimetypes
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from headwater.dashboard.answers import NOT_KEPT, SECURITY_HEADERS, Refused

_PAGE = "index.html"
_FOREVER = {**SECURITY_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
"""A file's name has the hash of its content, so that another content is another file."""


class PageFiles:
    """Serves the files of the page by name, and nothing else."""

    def __init__(self) -> None:
        self._files = {
            entry.name: entry.read_bytes() for entry in files("headwater.dashboard").joinpath("assets").iterdir()
        }

    async def show_page(self, request: Request) -> Response:
        return Response(self._files[_PAGE], headers=NOT_KEPT, media_type="text/html")

    async def show_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None:
            raise Refused(404, "The page has no such file: load it anew")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(content, headers=_FOREVER, media_type=kind)
