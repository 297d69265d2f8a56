"""Clusters: which node has which vbucket, and the coordinator that makes it so."""
