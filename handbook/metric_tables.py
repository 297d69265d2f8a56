"""Tables of metrics, from the collectors that Prometheus reads."""

from __future__ import annotations

from handbook.markdown import code, table
from headwater.spark.landing_metrics import LandingMetrics


def landing_metrics_table() -> str:
    # A lag that is not known would leave its metric out.
    families = LandingMetrics(bucket="", lag=0).collect()
    rows = [
        (code(f"{one.name}_total" if one.type == "counter" else one.name), one.type, one.documentation.rstrip("."))
        for one in families
    ]
    return table(("metric", "type", "meaning"), rows)
