"""A declarative pipeline over the shop in a bucket (Spark 4.1 or newer): what happened, and what holds now.

`order_changes` is a streaming table: each run appends the changes since the last one. It is a log, in which a failover
is a row with `op = 'rollback'`. Do not derive the current state from it: no query of a few lines can tell which
rows a rollback takes back.

`orders` and `turnover` are materialized views of the live documents. Each run computes them from the bucket, so they
are right after a failover, too. A bucket that is too large for that belongs in a lake (`headwater land`): then use
`headwater.spark.documents`, or follow its change feed with AUTO CDC (docs/guides/following.md).
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

spark = SparkSession.active()
URL = spark.conf.get("spark.headwater.url")


@dp.table
def order_changes() -> DataFrame:
    return (
        spark.readStream.format("dcp")
        .options(url=URL, collections="shop.orders", value="string")
        .load()
        .select("vbucket", "vbuuid", "seqno", "op", "key", "value", "changed_at")
    )


@dp.materialized_view
def orders() -> DataFrame:
    lines = "ARRAY<STRUCT<product: STRING, quantity: INT, price: DOUBLE>>"
    return (
        spark.read.format("dcp")
        .schema(f"key STRING, customer STRING, ordered_at STRING, lines {lines}")
        .options(url=URL, collections="shop.orders", mode="documents")
        .load()
    )


@dp.materialized_view
def turnover() -> DataFrame:
    lines = spark.read.table("orders").select("customer", sql.explode("lines").alias("line"))
    total = sql.sum(sql.col("line.quantity") * sql.col("line.price"))
    return lines.groupBy("customer").agg(total.alias("turnover"))
