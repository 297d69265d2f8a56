"""Bulk import and export of documents: `headwater load` and `headwater export`.

Load: `inputs` opens the input, `json_lines` and `tables` read its documents, `key_template` makes their keys, or
generates documents; `set_frames` encodes them as frames and `loader` sends them. Export: `export_files` stores what
is read until it is known which documents are live, and writes those. `json_lines` describes an exported line.
`change_lines` writes changes, rather than documents, as lines for `headwater tail`.
"""
