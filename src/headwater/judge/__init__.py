"""The judge of consumers: it runs any program that follows a bucket against a cluster that fails as a seed decides.

`plan` derives the writes and faults from a seed, `consumer` reads the consumer's output and compares it with the
bucket, and `run` operates the cluster and the consumer's process. The command is `headwater judge`.
"""
