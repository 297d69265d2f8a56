"""A pytest plug-in: real nodes and clusters for the tests of anything that speaks to them.

Its fixtures are `headwater_node` (a `HeadwaterNode`) and `headwater_cluster` (a `HeadwaterCluster`). Where neither is
used, nothing but `plugin` is imported.
"""
