"""The server: the key-value front end, DCP producer and consumer, users, cluster map."""
