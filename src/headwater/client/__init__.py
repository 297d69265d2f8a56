"""The client: reads and writes any server that speaks the Couchbase protocol."""
