"""The dashboard: the page that a node serves under `/ui`, what feeds it, and the metrics for Prometheus."""
