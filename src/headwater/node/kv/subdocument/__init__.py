"""The sub-document engine: pure functions that look up and change parts of a JSON document by path.

`execute` runs whole requests; the handlers bring the document and write what comes out. `requests` checks what was
asked, and has what is not stored in the document; `json_text` has paths and lookups.
"""
