"""The files in deploy/ fit the commands that they run, and each other; linters have no objection where they are there.

No container is started here: the image is built and tried by hand, see docs/guides/deploying.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headwater.cli import load_command
from support.cases import case_apart
from support.doc_blocks import ROOT

DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = "/opt/headwater/bin/headwater"
PIPELINE = '[pipelines.shop]\nurl = "couchbase://db/shop"\ninto = "lake"\npassword = "${SHOP_PASSWORD}"\n'


def compose() -> dict[str, Any]:
    read = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(read, dict)
    return read


def parse(words: list[str]) -> click.Context:
    """Read a command line as the command does, without running it. Raises for what the command does not know."""
    return load_command(words[0]).make_context(words[0], words[1:])


@case_apart("node")
@case_apart("landing")
def test_services_run_commands_that_exist(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    described = compose()["services"][service]
    for name in described["environment"]:
        monkeypatch.setenv(name, "a value of sixteen")
    context = parse(described["command"])
    volumes = {volume.partition(":")[2] for volume in described["volumes"]}
    assert str(context.params["data"] if service == "node" else context.params["into"]) in volumes


def test_what_prometheus_reads_is_served() -> None:
    services = compose()["services"]
    read = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    for job in read["scrape_configs"]:
        [target] = job["static_configs"][0]["targets"]
        host, _, port = target.partition(":")
        assert f"127.0.0.1:{port}:{port}" in services[host]["ports"]
    [secret] = services["prometheus"]["secrets"]
    assert read["scrape_configs"][1]["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose()["secrets"][secret]["environment"] in services["landing"]["environment"]


def test_files_that_are_mounted_are_there() -> None:
    mounted = [volume.split(":") for service in compose()["services"].values() for volume in service["volumes"]]
    files = {inside: DEPLOY / outside for outside, inside, *_ in mounted if outside.startswith(".")}
    [rules] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    assert f"/etc/prometheus/{rules}" in files
    assert [str(path) for path in files.values() if not path.exists()] == []
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    home = compose()["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder, _, name = home.rpartition("/")
    assert provider["options"]["path"] == folder
    assert json.loads((files[folder] / name).read_text())["title"] == "Headwater"


def test_no_port_is_published_beyond_this_machine() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_commands_that_exist(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    (tmp_path / "headwater.toml").write_text(PIPELINE)
    starts = re.findall(rf"^ExecStart(?:Pre)?={PROGRAM} (.+)$", unit.read_text(), re.M)
    assert len(starts) == 2
    for start in starts:
        line = start.replace("%i", "shop").replace("%S", "/var/lib").replace("/etc/headwater", str(tmp_path))
        parse(line.split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name.replace("@", "@shop")
    # It looks for the program, which is not installed here.
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_hadolint_takes_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not here")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_gets_all_that_the_package_is_built_from() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    named = {name for line in copied for name in line.split()}
    allowed = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert named == allowed
    assert [name for name in named if not (ROOT / name).exists()] == []


def needed(extras: list[str]) -> Iterator[Requirement]:
    """What pyproject.toml asks for, with these extras and those that they name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for text in [*project["dependencies"], *(one for extra in extras for one in optional[extra])]:
        requirement = Requirement(text)
        yield from needed(sorted(requirement.extras)) if requirement.name == "headwater" else [requirement]


@pytest.mark.parametrize(("name", "extras"), [("dev", ["dev"]), ("image", ["node", "spark"])])
def test_the_lock_files_have_what_pyproject_asks_for(name: str, extras: list[str]) -> None:
    lock = (ROOT / "requirements" / f"{name}.lock").read_text()
    assert "://" not in lock, "an index is for pip to know"
    pinned = r"^([\w.-]+)(?:\[[\w,]+\])?==([^ ;]+).*(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+"
    entries = re.findall(pinned, lock, re.M)
    assert len(entries) == len(re.findall(r"^\S", lock, re.M)), "each has its hashes"
    locked = {canonicalize_name(package): version for package, version in entries}
    assert {"hatchling", "editables"} <= locked.keys()
    for requirement in needed(extras):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), "run `make lock`"
