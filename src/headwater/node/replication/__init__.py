"""What a node does for its copies: it streams them from their active nodes, as the cluster's config says."""
