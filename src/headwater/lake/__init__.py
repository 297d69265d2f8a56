"""The tables that changes are landed in: Delta tables, made of Arrow and delta-rs alone, with no Spark in here.

`changes` has one row for every change of every collection, the events of collections and the rollbacks among them. It
is the truth: all else is made from it, and can be made again. `documents` has a table a collection, with one row a live
document; beside them lie `history` (one row a version) and `rejects` (what does not fit the typed columns).
`docs/internals/lake.md` has the format, and why it is exact.

*Batch*: the batches of a lake are numbered as they are committed to `changes`, and every row there has its number.
*Group*: vbuckets are put into a fixed number of groups. A key is always in one vbucket and a vbucket in one group, so
a group is merged by itself: it is the unit of work and of progress.
*Merged*: every table of documents knows the batch up to which it has been merged. What is in `changes` behind it is
*pending*. A reader that needs the present takes both (`Lake.documents_now`).

Executors write files that no commit names. The driver makes them live by a commit to the table's log, all or nothing,
and that commit says what the table holds then: the offset in every vbucket, and the batch. The next batch begins at
these offsets, and there is no other memory. So a crash between any two steps is completed by the next run.

A rollback marks the rows that it took back as *void*, in the commit that brings it. From then on `changes` without its
void rows is one consistent history, and a table with a rollback pending makes the vbucket again from it. So
a rollback is undone in `change_files.void_rows` (`changes`), `change_rows.Fold` (`documents`) and `history`.

The modules
-----------
`lake` is the driver's view: all tables, opened together. `commits` brings a batch into `changes`, and what is pending
into the tables of documents. `collection_tables` are the tables of one collection, `upkeep` joins, trims and deletes
files. The work for executors is in `change_files` (a batch to files, and the marks of rollbacks), `documents_merge`
with `change_rows`, `row_order` and `history` (merging) and `typed_columns` with `column_values`, `json_fields` and
`json_text`. `chosen_rows` decides which changes get into a lake: `where` has the conditions, and `Transform` the
function of a user's. `layout` says which tables there are and which columns they have, `location` where they lie and
how files are read and written there, in a directory or an object store. `delta_log` is the only module that commits,
`table_state` what a commit says that the table holds, and `data_files` the only module that knows Parquet. `set_aside`
keeps the fault of one table from all others. `iceberg` keeps Iceberg tables beside the Delta tables.

`headwater verify` proves it: `verify` is the driver, `verify_group` the task that judges a group of vbuckets,
`verify_scan` reads every file and keeps the findings, `verify_hashes` makes hashes of rows, `verify_judging` compares
them with those of the bucket, and `verify_changes` judges what the bucket does not have. `repair` makes again what it
finds wrong.
"""
