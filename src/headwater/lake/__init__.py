"""The tables that changes are landed in: Delta tables, made of Arrow and delta-rs alone, with no Spark in here.

What lies where
---------------
`changes` has one row for every change of every collection, the events of collections and the rollbacks among them. It
is the truth: all else is made from it, and can be made again. `documents` has a table a collection, with one row a live
document; beside them lie `history` (one row a version) and `rejects` (what does not fit the typed columns).

Three numbers
-------------
*Batch*: the batches of a lake are numbered as they are committed to `changes`, and every row there has its number.
*Group*: vbuckets are put into a fixed number of groups. A key is always in one vbucket and a vbucket in one group, so
a group is merged by itself: it is the unit of work and of progress.
*Merged*: every table of documents knows the batch up to which it has been merged. What is in `changes` behind it is
*pending*.

A table of documents is then always this: what its rows say, which is every vbucket at the offset that it had at
*merged*, and the pending changes on top. A reader that needs the present takes both (`Lake.documents_now`); one that
takes the table alone gets what was true at the offsets that its log names. These are of one moment only if the batches
were cut at one (`--consistent`); else the offsets of some vbuckets are later than those of others.

Exactly once
------------
Executors write files that no commit names. The driver makes them live by a commit to the table's log, all or nothing,
and that commit says what the table holds then: the offset in every vbucket, and the batch. The next batch begins at
these offsets, and there is no other memory. An attempt that crashed has written files that are never read, and `vacuum`
deletes them. A merge that is repeated is planned from what is pending, and what has been merged is not pending. So a
crash between any two steps is completed by the next run.

Rollback
--------
The row of a rollback says: of this vbucket, what came before me above this seqno never happened. The commit that brings
the row marks all those rows as *void*, in the same commit, by writing the few files again that hold such rows. From
then on `changes` without its void rows is one consistent history. A table with a rollback pending is merged at once:
what it holds of the vbucket is dropped, and made again from `changes`. That is simple, and it is exact also for
documents that were removed, or whose collection was dropped, on the branch that is dead.

`changes` may be trimmed to a retention time. A rollback that goes behind that can't be undone; then the whole vbucket
is void, and has to be read again from 0.

What it costs
-------------
A batch costs what it holds: its files, one commit, and no look at older files but the log. A merge costs what the files
hold that have a document in them which has changed; how often it is made is decided by `headwater.spark.freshness`. A
first load finds no rows to replace, and appends.

The modules
-----------
`lake` is the driver's view: all tables, opened together. `commits` brings a batch into `changes`, and what is pending
into the tables of documents. `collection_tables` are the tables of one collection, `upkeep` joins, trims and deletes
files. The work for executors is in `change_files` (a batch to files), `rollbacks` (marking what one took back),
`documents_merge` with `change_rows`, `row_order` and `history` (merging) and `typed_columns` with `column_values`,
`json_fields` and `json_text`.
`layout` says which tables there are and which columns they have, `location` where they lie and how files are read and
written there, in a directory or an object store. `delta_log` is the only module that commits, `table_state` what a
commit says that the table holds, and `data_files` the only module that knows Parquet. `set_aside` keeps the fault of
one table from all others. `iceberg_changes` copies `changes` to an Iceberg table, and `iceberg_documents` gives the
files of `documents` to others.

`headwater verify` proves it: `verify` is the driver, `verify_group` the task that judges a group of vbuckets,
`verify_scan` reads every file and keeps the findings, `verify_hashes` makes hashes of rows, `verify_judging` compares
them with those of the bucket, and `verify_changes` and `verify_history` judge what the bucket does not have. `repair`
makes again what it finds wrong.
"""
