"""`make demo`: a bucket in Delta tables, exactly, while writes go on and after a failover.

Everything here is done as a user does it: with the commands, with the Couchbase SDK, and with `headwater.spark`.
"""
