"""Spark looks for its Python data sources in top-level modules named `pyspark_*`; the `dcp` source belongs here."""
