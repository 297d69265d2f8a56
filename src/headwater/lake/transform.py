"""A function of the user's that changes go through before they are landed: to mask what must not be in a lake, or to
give documents another shape.

It gets a batch of the client and returns one, in the task that reads the bucket, so nothing that it takes out is ever
written. It may change the columns `value`, `datatype` and `xattrs`, and nothing else: merges, rollbacks and later reads
rest on keys and seqnos. This is checked for every batch. Rows that are no changes of documents (rollbacks, events)
stay as they are, whatever it does to them.

The tables know its name. `verify` applies it to the bucket, and then compares as ever.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa

from headwater.client.batches import OPS
from headwater.errors import InvalidInput

TransformFunction = Callable[[pa.RecordBatch], pa.RecordBatch]

FREE_COLUMNS = frozenset({"value", "datatype", "xattrs"})
_DOCUMENT_OPS = OPS[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A function with its name, which travels to where tasks run."""

    name: str
    pickled: bytes = field(repr=False)

    @classmethod
    def of(cls, function: TransformFunction, dumps: Callable[[TransformFunction], bytes] = pickle.dumps) -> Self:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if not callable(function) or "<" in name:
            raise InvalidInput(f"{name} can't be a transform", hint="Give a named function from a batch to a batch")
        try:
            return cls(name=name, pickled=dumps(function))
        except Exception as error:
            raise InvalidInput(
                f"the transform {name} can't be sent to tasks: {error}", hint="Give a function that can be pickled"
            ) from error

    def function(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """The function with its checks, for one task."""
        function: TransformFunction = pickle.loads(self.pickled)

        def apply(batch: pa.RecordBatch) -> pa.RecordBatch:
            try:
                changed = function(batch)
            except Exception as error:
                raise InvalidInput(
                    f"the transform {self.name} has failed: {type(error).__name__}: {error}",
                    hint="Fix it and start again: the batch has not landed",
                ) from error
            self._check(batch, changed)
            return _only_documents(batch, changed)

        return apply

    def _check(self, batch: pa.RecordBatch, changed: object) -> None:
        problem = None
        if not isinstance(changed, pa.RecordBatch):
            problem = f"has returned a {type(changed).__name__}"
        elif changed.num_rows != batch.num_rows:
            problem = f"was given {batch.num_rows} rows and has returned {changed.num_rows}"
        elif not changed.schema.equals(batch.schema):
            problem = "has returned other columns, or columns of other types"
        else:
            for name in batch.schema.names:
                if name not in FREE_COLUMNS and not changed.column(name).equals(batch.column(name)):
                    problem = f"has changed the column {name}"
        if problem is not None:
            raise InvalidInput(
                f"the transform {self.name} {problem}",
                hint="It may change only the columns value, datatype and xattrs of the given rows",
            )


def _only_documents(batch: pa.RecordBatch, changed: pa.RecordBatch) -> pa.RecordBatch:
    """What was made of the changes of documents, and all other rows as they were."""
    ops = batch.column("op")
    is_other = np.array([op not in _DOCUMENT_OPS for op in ops.dictionary.to_pylist()])[ops.indices.to_numpy()]
    if not is_other.any():
        return changed
    rows = batch.num_rows
    from_both = pa.array(np.arange(rows) + np.where(is_other, 0, rows))
    both = pa.Table.from_batches([batch, changed]).take(from_both)
    return both.combine_chunks().to_batches()[0]
