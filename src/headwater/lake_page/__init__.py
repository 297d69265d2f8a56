"""The page of a lake: the state of a landing, what has happened, and samples of the tables, in a browser.

`lake.lake_look` reads the tables and the notes beside them; `app` combines this with a landing in this process, has the
routes, checks access, and serves the page in a thread beside the rest of the program. The page works with a bucket of
any server, and with a lake that no process writes to. `headwater land --ui` and `headwater ui` use it.

`web/lake` is built into `assets`. Nothing here changes a table, and nothing contacts the bucket.
"""
