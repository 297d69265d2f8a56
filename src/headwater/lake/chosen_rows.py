"""Which changes of a bucket get into a lake, and in what form. A landing, `verify` and `repair` all read through this
module, so they agree.

* System records are left out, unless the selection includes them: the scope `_system`, which servers use for
  themselves, and documents of SDK transactions, whose keys begin with `_txn:` (active transaction records, client
  records). Their rows are dropped, with removals and events, and offsets advance past them. A selection that names
  `_system` includes that scope.
* With a condition (`where`), a write of a document that does not meet it stays as a row with the operation `unmatched`,
  without value and extended attributes. It ends the version before it, as a removal would. So `changes` still records
  for every key what came when, and a rollback restores the earlier version. Removals and events stay as they are.
* The transform, if there is one, gets what is left.

The server can't leave these rows out: a stream's filter only names collections to send.

A transform is a user's function that is applied to changes before they are landed: to mask what must not be in a lake,
or to reshape documents. It gets a batch of the client and returns one, in the task that reads the bucket, so nothing
that it removes is ever written. It may change only the columns `value`, `datatype` and `xattrs`: merges, rollbacks and
later reads rely on keys and seqnos. Every batch is checked for this. Rows that are not changes of documents (rollbacks,
events) stay as they are, whatever the function returns for them.

The tables record the transform's name. `verify` applies it to the bucket's changes before it compares them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.client.batches import OPS
from headwater.errors import InvalidInput
from headwater.lake.layout import UNMATCHED_OP
from headwater.lake.table_state import Selection
from headwater.lake.where import Where

TransformFunction = Callable[[pa.RecordBatch], pa.RecordBatch]

FREE_COLUMNS = frozenset({"value", "datatype", "xattrs"})
_DOCUMENT_OPS = OPS[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A function and its name, pickled for the tasks."""

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
        """Return the function with its checks, for one task."""
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
    """Take changes of documents from `changed`, and all other rows from `batch`."""
    ops = batch.column("op")
    is_other = np.array([op not in _DOCUMENT_OPS for op in ops.dictionary.to_pylist()])[ops.indices.to_numpy()]
    if not is_other.any():
        return changed
    rows = batch.num_rows
    from_both = pa.array(np.arange(rows) + np.where(is_other, 0, rows))
    both = pa.Table.from_batches([batch, changed]).take(from_both)
    return both.combine_chunks().to_batches()[0]


# --- which rows -------------------------------------------------------------------------------------------------------


SYSTEM_SCOPE = "_system"
TRANSACTION_PREFIX = b"_txn:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRows:
    """What is done to each batch of the client. It is sent to the tasks."""

    without_system: bool = False
    without_system_scope: bool = False
    where: Where | None = None
    transform: Transform | None = None

    @classmethod
    def of(cls, selection: Selection, transform: Transform | None = None) -> Self:
        return cls(
            without_system=not selection.system,
            without_system_scope=not selection.system and selection.is_of_all,
            where=Where.parse(selection.where) if selection.where else None,
            transform=transform,
        )

    def function(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Return a function from batch to batch, for one task."""
        transform = None if self.transform is None else self.transform.function()

        def choose(batch: pa.RecordBatch) -> pa.RecordBatch:
            if self.without_system:
                batch = without_system(batch, scope=self.without_system_scope)
            if self.where is not None:
                batch = _unmatched(batch, self.where)
            return batch if transform is None else transform(batch)

        return choose


def without_system(batch: pa.RecordBatch, *, scope: bool) -> pa.RecordBatch:
    """Leave out the records of transactions, and with `scope` also those of the `_system` scope."""
    marks = pc.fill_null(pc.starts_with(batch.column("key"), pattern=TRANSACTION_PREFIX), False)
    scopes = batch.column("scope")
    if scope and SYSTEM_SCOPE in (names := scopes.dictionary.to_pylist()):
        marks = pc.or_(marks, pc.fill_null(pc.equal(scopes.indices, names.index(SYSTEM_SCOPE)), False))
    return batch.filter(pc.invert(marks)) if pc.any(marks, min_count=0).as_py() else batch


def _unmatched(batch: pa.RecordBatch, where: Where) -> pa.RecordBatch:
    """Mark the writes of documents that do not meet the condition as `unmatched`, and remove what they wrote."""
    ops = batch.column("op")
    names = ops.dictionary.to_pylist()
    codes = np.asarray(ops.indices.to_numpy())
    wrong = np.array([name == "mutation" for name in names])[codes] & ~where.met(batch)
    if not wrong.any():
        return batch
    codes = np.where(wrong, len(names), codes).astype(np.int8)
    kept = pa.array(np.arange(batch.num_rows), mask=wrong)
    changed = {
        "op": pa.DictionaryArray.from_arrays(pa.array(codes), pa.array([*names, UNMATCHED_OP])),
        "datatype": pc.if_else(pa.array(wrong), pa.scalar(0, batch.schema.field("datatype").type), batch["datatype"]),
        **{name: batch.column(name).take(kept) for name in ("value", "xattrs") if name in batch.schema.names},
    }
    columns = [changed.get(name, batch.column(name)) for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
