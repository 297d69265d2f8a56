"""The tables that changes are landed in: Delta tables, written with Arrow and delta-rs, without Spark.

`changes` has one row for each change of every collection, including events of collections and rollbacks. It is the
source of truth: all other tables are made from it, and can be rebuilt. `documents` has one table for each collection,
with one row per live document; beside it lie `history` (one row per version) and `rejects` (values that do not fit the
typed columns). `docs/internals/lake.md` describes the format, and why it is exact.

*Batch*: the batches of a lake are numbered as they are committed to `changes`, and every row has its batch's number.
*Group*: vbuckets are divided into a fixed number of groups. A key is always in one vbucket and a vbucket in one group,
so each group is merged by itself: it is the unit of work and of progress.
*Merged*: every table of documents records the batch up to which it has been merged. Later rows of `changes` are
*pending*. A reader that needs the present reads both (`Lake.documents_now`).

Executors write files that no commit names yet. The driver makes them live with one atomic commit to the table's log.
The commit also records what the table holds: the offset of every vbucket, and the batch. The next batch begins at
these offsets; no other state is kept. So after a crash between any two steps the next run completes the work.

The commit that contains a rollback marks the rows that it took back as *void*. From then on `changes` without its void
rows is one consistent history, and a table with a pending rollback rebuilds the vbucket from it. Rollbacks are undone
in `change_files.void_rows` (`changes`), `change_rows.Fold` (`documents`) and `history`.

The modules
-----------
`lake` is the driver's view: all tables, opened together. `commits` writes a batch into `changes`, and pending changes
into the tables of documents. `collection_tables` has the tables of one collection; `upkeep` compacts, trims and deletes
files. The executors' work is in `change_files` (a batch to files, and the marks of rollbacks), `documents_merge` with
`change_rows`, `row_order` and `history` (merging) and `typed_columns` with `column_values`, `json_fields` and
`variants`. `chosen_rows` decides which changes get into a lake: `where` has the conditions, and `Transform` the
user's function. `layout` defines the tables and their columns, `location` where they lie and how files are read and
written, in a directory or an object store. `delta_log` is the only module that commits, `table_state` defines what a
commit says the table holds, and `data_files` is the only module that knows Parquet. `set_aside` keeps a fault of one
table from affecting the others. `iceberg` keeps Iceberg tables beside the Delta tables.

`headwater verify` checks that a lake is exact: `verify` is the driver, `verify_group` the task that judges a group of
vbuckets, `verify_scan` reads every file and keeps the findings, `verify_hashes` hashes rows, `verify_judging` compares
the hashes with those of the bucket, and `verify_changes` judges what the bucket does not have. `repair` rebuilds what
is wrong.
"""
