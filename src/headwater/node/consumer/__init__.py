"""The DCP consumer, sans-IO: from the frames of another node's streams to this bucket's copies of its vbuckets."""
