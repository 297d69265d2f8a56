"""The folder `_headwater`, which earlier versions kept beside the tables: what was asked for is still read from it.

Today the log of `changes` says all of it, and no such folder is made.
"""

from __future__ import annotations

import json

import pyarrow.fs as fs

from headwater.errors import InvalidInput
from headwater.spark.lake.delta_log import Selection
from headwater.spark.lake.lake import Lake
from headwater.spark.lake.layout import open_filesystem

OWN_FOLDER = "_headwater"
_SELECTION = "selection.json"


def landed_selection(lake: Lake) -> Selection | None:
    """What of the bucket is landed in a lake; None where that is not known."""
    if lake.state.selection is not None:
        return lake.state.selection
    filesystem, path = open_filesystem(f"{lake.place.root.rstrip('/')}/{OWN_FOLDER}/{_SELECTION}")
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as file:
        try:
            held = json.loads(file.read())
            return Selection.of(held["scopes"], held["collections"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"{path} can't be read: {error!r}", hint="Remove it, if the options are as before"
            ) from error


def names_in(directory: str) -> list[str]:
    """What a directory holds; nothing where there is none."""
    filesystem, path = open_filesystem(directory)
    try:
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except OSError as error:
        raise InvalidInput(
            f"{directory} can't be used: {error}", hint="Give a directory that can be written"
        ) from error
    return sorted(entry.base_name for entry in found)
