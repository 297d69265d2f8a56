"""Vbuckets that survive kill -9: documents by key, changes by seqno, failover logs, collections.

Sans-IO except for the engine below it: time and randomness are passed in, and only the engine uses files.
"""
