"""The sub-document engine: pure functions that look up and change parts of a JSON document by path.

`execute` runs whole requests; the handlers bring the document and write what comes out. `requests` checks what was
asked, `json_text` has paths and lookups, `mutation` the changes, `virtual_xattrs` what is not stored in the document.
"""
