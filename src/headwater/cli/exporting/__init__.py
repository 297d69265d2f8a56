"""The parts of `headwater export`.

A DCP read from the beginning to now brings the newest version of each key, but not only that: what changes during the
read comes again, documents are removed, collections are dropped, and a failover takes changes back. So the rows are
spooled first (`spool`) while `survivors` notes what voids which of them, in a few numbers and the keys that came twice.
Then the spool is read again, and what survives is written as JSON lines (`json_lines_file`) or in columns
(`column_survey`, `table_file`), to files that appear when they are whole (`output_files`).
"""
