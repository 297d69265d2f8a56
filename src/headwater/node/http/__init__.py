"""The HTTP side: what clients bootstrap from and create collections by, as Couchbase's cluster manager has it."""
