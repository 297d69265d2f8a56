"""What `headwater load` is made of: the files it is given, the documents in them, what it shows, and what it tells."""
