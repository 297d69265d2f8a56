"""The HTTP side of a node, as in Couchbase's cluster manager: clients bootstrap and manage buckets and users here."""
