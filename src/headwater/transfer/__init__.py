"""Documents in and out of a bucket, in bulk: `headwater load` and `headwater export`."""
