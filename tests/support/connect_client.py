"""`python connect_client.py URL FOLDER`: a program that uses Spark Connect and has no Java machine of its own.

PySpark starts the server for it. Each line that it prints, as JSON, reports a step that is done; before each
landing it waits for a line on its standard input. The login is in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater import spark as headwater_spark
from headwater.errors import LakeFull
from headwater.spark.executors import SparkRunner
from headwater.spark.query_errors import query_error


def tell(**step: object) -> None:
    print(json.dumps(step), flush=True)


def login() -> dict[str, str]:
    return {"user": os.environ["HEADWATER_USER"], "password": os.environ["HEADWATER_PASSWORD"]}


def read(spark: SparkSession, url: str, folder: str) -> None:
    options = {"url": url}
    found = spark.read.format("dcp").options(**options).load()
    tell(read=found.count(), session=type(spark).__module__)
    headwater_spark.register(spark)
    options |= login()
    stream = spark.readStream.format("dcp").options(**options).load()
    writer = stream.writeStream.format("memory").queryName("seen").option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()
    found = spark.read.format("dcp").options(**options).load()
    tell(streamed=spark.table("seen").count(), read_again=found.count())
    try:
        spark.read.format("dcp").options(**options, colections="a.b").load().count()
    except PySparkException as error:
        tell(refused=str(query_error(error)))
    try:
        SparkRunner(spark)([SimpleNamespace(run=partial(Path("/dev/full").write_bytes, b"no room"))])
    except LakeFull as error:
        tell(full=str(error))


def main(url: str, folder: str) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    read(spark, url, folder)
    for line in sys.stdin:
        batches: list[headwater_spark.LandedBatch] = []
        query = headwater_spark.land(spark, url, f"{folder}/lake", **login(), min_partitions=2, on_batch=batches.append)
        query.awaitTermination()
        tell(landed=line.strip(), rows=sum(batch.rows for batch in batches))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
