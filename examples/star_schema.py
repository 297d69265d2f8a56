"""Orders to a star schema, with Spark SQL.

    headwater load couchbase://127.0.0.1/default examples/shop --create-collections
    python examples/star_schema.py couchbase://127.0.0.1/default star/

The bucket has documents in `shop.customers`, `shop.products` and `shop.orders`; an order has lines. They are made into
two dimensions and a fact with one row a line, as Parquet, and a report over them. It reads the bucket once, to now. To
keep such tables up to date, let `headwater land` keep the documents in Delta tables, and read those instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession

from headwater import HeadwaterError
from headwater.spark import start_session

DIM_CUSTOMER = """
    SELECT key AS customer_key, doc.name AS name, doc.city AS city
    FROM customers
"""
DIM_PRODUCT = """
    SELECT key AS product_key, doc.title AS title, doc.category AS category, doc.price AS list_price
    FROM products
"""
FACT_ORDER_LINE = """
    SELECT key AS order_key, doc.customer AS customer_key, line.product AS product_key,
           to_date(doc.ordered_at) AS ordered_on, line.quantity AS quantity, line.quantity * line.price AS amount
    FROM orders LATERAL VIEW explode(doc.lines) AS line
"""
REPORT = """
    SELECT city, category, sum(quantity) AS pieces, round(sum(amount), 2) AS turnover
    FROM fact_order_line JOIN dim_customer USING (customer_key) JOIN dim_product USING (product_key)
    GROUP BY city, category ORDER BY turnover DESC
"""
FIELDS = {
    "customers": "name STRING, city STRING",
    "products": "title STRING, category STRING, price DOUBLE",
    "orders": "customer STRING, ordered_at STRING, lines ARRAY<STRUCT<product: STRING, quantity: INT, price: DOUBLE>>",
}
TABLES = {"dim_customer": DIM_CUSTOMER, "dim_product": DIM_PRODUCT, "fact_order_line": FACT_ORDER_LINE}


def live_documents(spark: SparkSession, url: str, collection: str, **login: str) -> DataFrame:
    """The newest version of each document of a collection, with its fields in `doc`."""
    source = spark.read.format("dcp").option("url", url).option("value", "string")
    changes = source.options(**login).option("collections", f"shop.{collection}").load()
    changes.createOrReplaceTempView("changes")
    # A key that changes while it is read comes again with a higher seqno. Nothing that was removed has a value.
    return spark.sql(f"""
        SELECT key, from_json(value, '{FIELDS[collection]}') AS doc FROM (
            SELECT key, max_by(struct(op, value), seqno) AS newest FROM changes
            WHERE op IN ('mutation', 'deletion', 'expiration') GROUP BY key)
        LATERAL VIEW inline(array(newest)) AS op, value
        WHERE op = 'mutation'
    """)


def build(spark: SparkSession, url: str, into: str, **login: str) -> DataFrame:
    """Write the star schema. Gives the report."""
    for collection in FIELDS:
        live_documents(spark, url, collection, **login).createOrReplaceTempView(collection)
    for name, query in TABLES.items():
        spark.sql(query).write.mode("overwrite").parquet(f"{into}/{name}")
        spark.read.parquet(f"{into}/{name}").createOrReplaceTempView(name)
    return spark.sql(REPORT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a star schema of a shop's bucket.")
    parser.add_argument("url", help="couchbase://host/bucket")
    parser.add_argument("into", help="the folder of the tables")
    options = parser.parse_args()
    with TemporaryDirectory() as settings:
        spark = start_session(log_folder=Path(settings))
        try:
            build(spark, options.url, options.into).show()
        finally:
            spark.stop()


if __name__ == "__main__":
    try:
        main()
    except HeadwaterError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
