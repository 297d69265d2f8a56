"""`make demo`: one document in three places: the bucket, the table that Headwater lands, and a table that ignores
rollbacks. A node is lost on the way.

Everything here is done as a user does it: with the commands, with the Couchbase SDK, and with `headwater.spark`.
"""
