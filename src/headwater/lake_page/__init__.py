"""The page of a lake: how a landing stands, what has happened, and what is in the tables, in a browser.

`state` puts together what is shown, from the tables, from the notes beside them and from a landing in this process;
`app` has the routes, checks who asks, and serves in a thread beside whatever the program does. It works with a bucket
of any server, and with a lake that no process writes to. `headwater land --ui` and `headwater ui` use it.

`web/lake` is built into `assets`. Nothing here changes a table, and nothing asks the bucket.
"""
