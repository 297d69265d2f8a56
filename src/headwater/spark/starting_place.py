"""Where a query that starts "now" has started.

Spark does not keep the offsets that the first batch of a query starts at: it asks for them again when it repeats that
batch after a crash. By then it is later. So the first "now" is written down, in the folder of the query
(`progressDir`), and holds from then on.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pyarrow.fs as fs

from headwater.client.offsets import Offsets
from headwater.spark.lake.layout import open_filesystem

_NAME = "first-start"


def first_start(folder: str, find: Callable[[], Offsets]) -> Offsets:
    """What is written down, or what `find` says, which is written down then."""
    filesystem, path = open_filesystem(folder)
    place = f"{path}/{_NAME}"
    if filesystem.get_file_info(place).type == fs.FileType.File:
        with filesystem.open_input_stream(place) as file:
            return Offsets.from_json(file.read().decode())
    found = find()
    filesystem.create_dir(path)
    unfinished = f"{path}/.{uuid.uuid4().hex}"
    with filesystem.open_output_stream(unfinished) as file:
        file.write(found.to_json().encode())
    filesystem.move(unfinished, place)
    return found
