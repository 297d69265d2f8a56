"""A standalone master with two workers, and a program that is submitted with Headwater in a zip file, or with an
archive of an environment that has all it needs.

The workers' executors have a cache of kernels that is empty, and a home directory that nothing can be written to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.fault_proxy import HOST, free_port
from support.landings import LOGIN, WAIT_S_MAX, SourceBucket, check_tables
from support.node_process import PASSWORD

SOURCE = Path(__file__).parents[2] / "src"
END_S_MAX = 400.0
WORKERS = 2
UNWRITABLE = "/proc"
SUBMITTED = """\
import json, os, sys
from pathlib import Path
from pyspark.sql import SparkSession
import headwater.spark

def look(_):
    import headwater
    from headwater.kernels.machine_code import code_folder
    return headwater.__file__, os.environ["SPARK_EXECUTOR_DIRS"], str(code_folder())

spark = SparkSession.builder.getOrCreate()
headwater.spark.land(spark, sys.argv[1], sys.argv[2], min_partitions=4).awaitTermination()
login = {"user": os.environ["HEADWATER_USER"], "password": os.environ["HEADWATER_PASSWORD"]}
verified = headwater.spark.verify(spark, sys.argv[1], sys.argv[2], **login)
counted = headwater.spark.documents(spark, sys.argv[2], "_default._default").count()
seen = spark.sparkContext.parallelize(range(4), 4).map(look).collect()
print(json.dumps({"equal": verified.is_equal, "counted": counted, "seen": seen}))
"""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a master with its workers, all on the loopback."""
    start = shutil.which("spark-class", path=str(Path(sys.executable).parent))
    assert start is not None, "it comes with PySpark"
    port, page = free_port(), free_port()
    url = f"spark://{HOST}:{port}"
    places = [("Master", "--port", str(port), "--webui-port", str(page))]
    places += [
        ("Worker", "--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / f"worker-{number}"),
         "--webui-port", "0", url)
        for number in range(WORKERS)
    ]  # fmt: skip
    environment = {
        **os.environ,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_IP": HOST,
        "PYSPARK_PYTHON": sys.executable,
    }
    with ExitStack() as stack, (tmp_path / "cluster.log").open("w") as log:
        for kind, *options in places:
            command = [start, f"org.apache.spark.deploy.{kind.lower()}.{kind}", "--host", HOST, *options]
            process = stack.enter_context(
                subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
            )
            stack.callback(process.terminate)
        give_up_s = time.monotonic() + WAIT_S_MAX * 2
        while _alive(page) < WORKERS:
            assert time.monotonic() < give_up_s, (tmp_path / "cluster.log").read_text()
            time.sleep(0.2)
        yield url


def _alive(page: int) -> int:
    try:
        return int(httpx.get(f"http://{HOST}:{page}/json/").json()["aliveworkers"])
    except httpx.TransportError:
        return 0


def _zip_file(folder: Path) -> tuple[list[str], str, str]:
    """Headwater alone. Returns options, the Python of the workers, and a part of the path of what they import."""
    package = folder / "headwater.zip"
    with zipfile.ZipFile(package, "w") as packed:
        for path in sorted(SOURCE.rglob("*.py")):
            packed.write(path, path.relative_to(SOURCE))
    return ["--py-files", str(package)], sys.executable, "headwater.zip"


def _archive(folder: Path) -> tuple[list[str], str, str]:
    """An environment with all packages but PySpark, which the cluster has. Needs the package index."""
    environment, archive = folder / "made", folder / "environment.tar.gz"
    venv.create(environment, with_pip=True)
    packages = (f"{SOURCE.parent}[lake]", "pandas<3", "venv-pack", "setuptools<81")
    for command in (
        ("-m", "pip", "install", "--quiet", *packages),
        ("-m", "venv_pack", "--quiet", "--prefix", str(environment), "-o", str(archive)),
    ):
        subprocess.run([environment / "bin" / "python", *command], check=True)
    return ["--archives", f"{archive}#environment"], "./environment/bin/python", "/environment/"


@pytest.mark.soak
@pytest.mark.parametrize("packed", [_zip_file, _archive])
def test_a_program_is_submitted_with_what_it_needs(
    master: str, bucket: SourceBucket, tmp_path: Path, packed: Callable[[Path], tuple[list[str], str, str]]
) -> None:
    for vbucket in range(4):
        bucket.put(bucket.keys("a", 50, vbucket=vbucket), b'{"a":1}')
    shipped, python, imported_from = packed(tmp_path)
    script, empty = tmp_path / "script.py", tmp_path / "empty"
    script.write_text(SUBMITTED)
    empty.mkdir()
    submit = shutil.which("spark-submit", path=str(Path(sys.executable).parent))
    assert submit is not None
    executors = {"HOME": UNWRITABLE, "XDG_CACHE_HOME": "", "TMPDIR": str(empty), **LOGIN}
    settings = {f"spark.executorEnv.{name}": value for name, value in executors.items()}
    settings |= {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.log.level": "ERROR",
        "spark.driver.host": HOST,
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | LOGIN
    environment |= {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": HOST}
    done = subprocess.run(
        [submit, "--master", master, "--driver-memory", "1g", *shipped, *options, str(script),
         bucket.url, str(tmp_path / "lake")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=END_S_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["equal"], said["counted"]) == (True, 200)
    packages, executors_, folders = map(set, zip(*said["seen"], strict=True))
    assert all(imported_from in path for path in packages)
    assert len(executors_) == WORKERS
    [folder] = folders
    assert folder.startswith(str(empty)), "a home that can't be written to is no hindrance"
    assert PASSWORD not in done.stdout + done.stderr
    assert len(check_tables(bucket, tmp_path / "lake")) == 200
