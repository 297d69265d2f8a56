"""Documents in and out of a bucket, in bulk: `headwater load` and `headwater export`.

Load: `inputs` opens what is given, `json_lines` and `tables` read its documents, `key_template` makes their keys, or
generates documents in place of a file; `set_frames` makes frames of them and `loader` sends them. Export:
`export_files` keeps what is read until it is known which documents are alive, and writes them. The form of an exported
line is in `json_lines`. `change_lines` writes changes, not documents, as lines for `headwater tail`.
"""
