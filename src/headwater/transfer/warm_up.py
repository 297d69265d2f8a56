"""Have all kernels that a loader uses compiled before it is in a hurry. They are kept on disk for the next process."""

from __future__ import annotations

from io import BytesIO

from headwater.transfer import set_frames
from headwater.transfer.generated_documents import GeneratedDocuments
from headwater.transfer.json_lines import JsonLines
from headwater.transfer.key_template import KeyTemplate


def warm_up() -> None:
    """Load a document of every kind, up to the frames."""
    set_frames.warm_up()
    template = KeyTemplate.parse("k::{id}::{#}")
    for documents in (JsonLines(BytesIO(b'{"id":1}\n'), template), GeneratedDocuments(1, KeyTemplate.parse("k::{#}"))):
        for batch in documents.batches():
            set_frames.encode_sets(batch, vbuckets=1)
