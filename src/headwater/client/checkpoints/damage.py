"""What is said of a checkpoint that is there and can't be read. It is never taken for one that is not there."""

from __future__ import annotations

from headwater.client.offsets import Offsets
from headwater.errors import CheckpointFailed, InvalidOffsets, OffsetsTooNew


def read_offsets(text: bytes, *, what: str, to_start_anew: str) -> Offsets:
    """The offsets in a text, or `CheckpointFailed`. `what` names the checkpoint, as in "the checkpoint …"."""
    try:
        return Offsets.from_json(text.decode("ascii"))
    except UnicodeDecodeError as error:
        raise damaged(what, "it is not the text of offsets", to_start_anew=to_start_anew) from error
    except OffsetsTooNew as error:
        raise CheckpointFailed(f"{what} can't be read: {error.reason}", hint=error.hint) from error
    except InvalidOffsets as error:
        raise damaged(what, error.reason, to_start_anew=to_start_anew) from error


def damaged(what: str, why: str, *, to_start_anew: str) -> CheckpointFailed:
    return CheckpointFailed(
        f"{what} is damaged: {why}",
        hint=f"Bring it back from a backup; to read from the beginning, {to_start_anew}",
    )
