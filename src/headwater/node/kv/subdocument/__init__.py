"""The sub-document engine: pure functions that look up and change parts of a JSON document by path.

`execute` runs whole requests; the handlers pass it the document and write the result. `requests` checks requests, and
has virtual attributes and macros; `json_text` has paths and lookups.
"""
