"""The judge of consumers: any program that follows a bucket, against a cluster on which things go wrong by a seed.

`plan` makes the writes and faults of a seed, `consumer` reads what the consumer says and compares it with the
bucket, `run` has the cluster and the consumer's process. The command is `headwater judge`.
"""
