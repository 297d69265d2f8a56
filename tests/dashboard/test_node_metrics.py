"""The node's metrics: who may read them, what they say, and that the Grafana file names what there is."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headwater.cli.land import LandingCollector, LandingMetrics
from headwater.client.prometheus import ReaderCollector
from headwater.landing.loop import LandingStatus
from headwater.node.http.dashboard import samples as samples_module
from headwater.node.http.dashboard.dashboard import KINDS, PREFIX
from headwater.protocol.numbers import Seqno, VBucketId
from support.dashboard_world import ADMIN, READER, VBUCKETS, serving

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "docs" / "reference" / "grafana" / "headwater.json"
ALERTS = ROOT / "deploy" / "alerts.yml"
DOCS = ROOT / "docs" / "reference" / "metrics.md"
LANDING = LandingStatus(
    is_active=True, doing="waiting", batch=1, rows=1, rollbacks=0, documents=1, tables=1, lag_seqnos=0, lag_s=0.0,
    documents_age_s=0.0, last_batch_s=0.1, last_merge_s=0.1, failures=0,
)  # fmt: skip


def samples(answer: httpx.Response) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def of(bucket: str, **labels: str) -> frozenset[tuple[str, str]]:
    return frozenset({"bucket": bucket, **labels}.items())


async def test_metrics_say_what_has_happened(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for number in range(6):
            await world.write(f"a{number}", vbucket=1)
        await asyncio.sleep(1.1)
        await world.node.roll_back("beer", VBucketId(1), Seqno(2))
        await asyncio.sleep(1.1)
        told = samples(await world.client.get("/metrics", auth=ADMIN))
        assert told[f"{PREFIX}documents", of("beer", state="active")] == 2
        assert told[f"{PREFIX}documents", of("wine", state="active")] == 0
        assert told[f"{PREFIX}vbuckets", of("beer", state="active")] == VBUCKETS
        assert told[f"{PREFIX}changes_total", of("beer")] == 6
        assert told[f"{PREFIX}rollbacks_total", of("beer")] == 1
        assert told[f"{PREFIX}commits_total", of("beer")] >= 6
        assert told[f"{PREFIX}disk_bytes", of("beer")] > 0
        assert told[f"{PREFIX}ready", frozenset()] == 1
    async with serving(tmp_path) as world:
        told = samples(await world.client.get("/metrics", auth=ADMIN))
        assert told[f"{PREFIX}rollbacks_total", of("beer")] == 1
        assert told[f"{PREFIX}lost_changes_total", of("beer")] == 4


async def test_metrics_need_a_log_in_and_show_what_one_may_see(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        assert (await world.client.get("/metrics")).status_code == 401
        assert (await world.client.get("/metrics", auth=(ADMIN[0], "wrong"))).status_code == 401
        told = samples(await world.client.get("/metrics", auth=READER))
        assert {dict(labels).get("bucket") for _, labels in told} == {"beer", None}


async def test_metrics_may_be_open(tmp_path: Path) -> None:
    async with serving(tmp_path, open_metrics=True) as world:
        told = samples(await world.client.get("/metrics"))
        assert {dict(labels).get("bucket") for _, labels in told} == {"beer", "wine", None}


async def test_health_and_readiness_need_no_log_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        assert (await world.client.get("/healthz")).json() == {"status": "ok"}
        assert (await world.client.get("/readyz")).status_code == 200
        world.node.is_ready = False
        assert (await world.client.get("/readyz")).status_code == 503
        assert (await world.client.get("/healthz")).status_code == 200


def all_names() -> set[str]:
    """Every metric that Headwater has, as Prometheus knows it."""
    node = {PREFIX + kind.name for kind in KINDS} | {f"{PREFIX}{name}" for name in ("info", "ready", "uptime_seconds")}
    client = {_full(family) for family in ReaderCollector().describe()}
    landing = {_full(family) for family in LandingCollector(LandingMetrics("b", lambda: LANDING)).collect()}
    return node | client | landing


def _full(family: object) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_grafana_uses_names_that_exist() -> None:
    dashboard = json.loads(GRAFANA.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    named = {name for text in expressions for name in re.findall(r"headwater_[a-z_]+", text)}
    assert named <= all_names(), named - all_names()
    assert {name.split("_")[1] for name in named} == {"node", "client", "land"}


def test_alerts_name_metrics_and_labels_that_exist() -> None:
    """And are what Prometheus reads: each rule has a name of its own, an expression, a severity and words."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    jobs = {job["job_name"] for job in yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())["scrape_configs"]}
    families = [kind.family(PREFIX, ("bucket",)) for kind in KINDS] + [*LandingCollector().describe()]
    labels = {_full(family): set(family._labelnames) for family in families} | {f"{PREFIX}ready": set(), "up": set()}
    for rule in rules:
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}, rule
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["expr"].count("(") == rule["expr"].count(")")
        named = re.findall(r"(?<![\w\"-])(?:headwater_\w+|up)(?![\w-])", rule["expr"])
        assert set(named) <= labels.keys(), rule
        known = set.union(*(labels[name] for name in named)) | {"instance", "job"}
        selected = {*re.findall(r"(\w+)=\"", rule["expr"]), *re.findall(r"by \((\w+)\)", rule["expr"])}
        assert selected | set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= known, rule
        assert set(re.findall(r'job="([^"]+)"', rule["expr"])) <= jobs
    assert {name.split("_")[1] for rule in rules for name in re.findall(r"headwater_\w+", rule["expr"])} == {
        "node",
        "land",
    }


def test_every_metric_of_the_node_is_documented() -> None:
    text = DOCS.read_text()
    missing = [name for name in sorted(all_names()) if name.startswith(PREFIX) and f"`{name}`" not in text]
    assert missing == []


async def test_a_full_disk_delays_history_and_fails_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as world:
        history = world.node.bucket_service("beer").history
        monkeypatch.setattr(samples_module, "EVENTS_ROOM_BYTES", 2**62)
        await world.write("a", vbucket=1)
        await world.node.roll_back("beer", VBucketId(1), Seqno(0))
        await asyncio.sleep(1.2)
        assert history.is_unsaved
        monkeypatch.setattr(samples_module, "EVENTS_ROOM_BYTES", 0)
        async with asyncio.timeout(10):
            while history.is_unsaved:
                await asyncio.sleep(0.05)
