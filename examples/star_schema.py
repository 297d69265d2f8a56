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
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from headwater import HeadwaterError
from headwater.spark import read, start_session

DIM_CUSTOMER = """
    SELECT key AS customer_key, name, city
    FROM customers
"""
DIM_PRODUCT = """
    SELECT key AS product_key, title, category, price AS list_price
    FROM products
"""
FACT_ORDER_LINE = """
    SELECT key AS order_key, customer AS customer_key, line.product AS product_key,
           to_date(ordered_at) AS ordered_on, line.quantity AS quantity, line.quantity * line.price AS amount
    FROM orders LATERAL VIEW explode(lines) AS line
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


def build(spark: SparkSession, url: str, into: str, **login: Any) -> DataFrame:
    """Write the star schema. Returns the report."""
    for collection, fields in FIELDS.items():
        documents = read(
            spark, url, mode="documents", collections=[f"shop.{collection}"], schema=f"key STRING, {fields}", **login
        )
        documents.createOrReplaceTempView(collection)
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
