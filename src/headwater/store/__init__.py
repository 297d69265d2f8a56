"""Vbuckets that survive kill -9: documents by key, changes by seqno, failover logs, collections.

Sans-IO but for the engine below it: time and randomness are passed in, files are the engine's business.
"""
