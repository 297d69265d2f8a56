"""Where offsets are kept between runs: a file, an SQLite database, or the bucket that is read."""

from __future__ import annotations

from headwater.client.checkpoints.file import CheckpointStore, FileCheckpoint
from headwater.client.checkpoints.sqlite import SqliteCheckpoint
from headwater.client.checkpoints.xattrs import XattrCheckpoint

__all__ = ["CheckpointStore", "FileCheckpoint", "SqliteCheckpoint", "XattrCheckpoint"]
