"""S3 (and Glue) by moto's server, and Azure by Microsoft's emulator, on loopback, each in a separate process.

moto accepts every key and every region. Here a request must be signed with the right key and for the right region,
as with S3 itself. Faults are set at run time: throttling, answers that are lost after the work was done, and
connections that break before it.

Azurite comes from npm (`npm install azurite`) and is found on the path; if it is missing, its tests are skipped.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from http.client import HTTPConnection
from typing import Any, Self

ACCESS_KEY, SECRET_KEY, REGION = "tests", "only-on-loopback", "eu-north-1"
READ_ONLY = "read-only"
"""A bucket of this name can't be written to."""
_FAULTS = "/_faults"
_SIGNED = re.compile(r"Credential=([^/]+)/[0-9]+/([^/]+)/(?:s3|glue)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The shares of all requests that fail."""

    slow_down: float = 0.0
    """503 SlowDown, and nothing is done."""
    lose_answer: float = 0.0
    """The connection breaks after the work is done."""
    reset: float = 0.0
    """The connection breaks before the work."""
    seed: int = 0


@dataclass
class _Server:
    """Runs until the `with` block ends. `__enter__` of a subclass starts it."""

    port: int = 0
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class S3Server(_Server):
    """moto's server, with faults."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.object_store"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path)},
        )
        self.port = int(self._process.stdout.readline())
        return self

    @property
    def options(self) -> dict[str, str]:
        """The options as a user gives them."""
        return {
            "aws_endpoint_url": self.url,
            "aws_allow_http": "true",
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "aws_region": REGION,
        }

    def make_bucket(self, name: str) -> str:
        """Create a bucket. Returns its URI."""
        self._client().create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        return f"s3://{name}"

    def keys(self, bucket: str) -> list[str]:
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def glue_tables(self, database: str) -> dict[str, dict[str, Any]]:
        """Return the tables of the Glue Data Catalog, which the same server provides."""
        return {table["Name"]: table for table in self._client("glue").get_tables(DatabaseName=database)["TableList"]}

    @property
    def environment(self) -> dict[str, str]:
        """The variables with Glue's address and login."""
        return {
            "AWS_ENDPOINT_URL_GLUE": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def set_faults(self, faults: Faults) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("PUT", _FAULTS, json.dumps(asdict(faults)))
        assert connection.getresponse().status == 200
        connection.close()

    def _client(self, service: str = "s3") -> Any:
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )


AZURITE = "azurite-blob"
_AZURE_KEY = base64.b64encode(SECRET_KEY.encode()).decode()
_LISTENS = re.compile(r"listens on http://127\.0\.0\.1:(?P<port>[0-9]+)")


class AzureServer(_Server):
    """Azurite, which keeps everything in memory. Its `url` is for the variable AZURITE_BLOB_STORAGE_URL."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [AZURITE, "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "-s"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCESS_KEY}:{_AZURE_KEY}"},
        )
        assert self._process.stdout is not None
        lines = [""]
        while not (found := _LISTENS.search(lines[-1])):
            lines.append(self._process.stdout.readline())
            assert lines[-1], f"azurite has ended: {lines}"
        self.port = int(found["port"])
        return self

    @property
    def options(self) -> dict[str, str]:
        """The options as a user gives them."""
        return {
            # Without it, delta-rs requests listings from an offset, which the emulator does not support.
            "azure_storage_use_emulator": "true",
            "azure_storage_account_name": ACCESS_KEY,
            "azure_storage_account_key": _AZURE_KEY,
        }

    def make_container(self, name: str) -> str:
        """Create a container. Returns its URI. Signs the request itself (Azure's "Shared Key"), which needs no SDK."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = "".join(f"{header}:{value}\n" for header, value in headers.items())
        text = "PUT" + "\n" * 12 + signed + f"/{ACCESS_KEY}/{ACCESS_KEY}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(_AZURE_KEY), text.encode(), "sha256")).decode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers |= {"Authorization": f"SharedKey {ACCESS_KEY}:{signature}", "Content-Length": "0"}
        connection.request("PUT", f"/{ACCESS_KEY}/{name}?restype=container", headers=headers)
        assert connection.getresponse().status == 201
        connection.close()
        return f"abfss://{name}@{ACCESS_KEY}.dfs.core.windows.net"


# --- the process ------------------------------------------------------------------------------------------------------

_Environ = dict[str, Any]
_Start = Callable[..., Any]


class _Manners:
    """WSGI in front of moto that checks permissions and injects faults."""

    def __init__(self, app: Callable[[_Environ, _Start], Iterable[bytes]]) -> None:
        self._app = app
        self._faults = Faults()
        self._random = random.Random(0)

    def __call__(self, environ: _Environ, start: _Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == _FAULTS:
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self._faults = Faults(**json.loads(body))
            self._random.seed(self._faults.seed)
            start("200 OK", [])
            return [b""]
        signed = _SIGNED.search(environ.get("HTTP_AUTHORIZATION", ""))
        if signed is None or signed[1] != ACCESS_KEY:
            return _refuse(start, "403 Forbidden", "InvalidAccessKeyId")
        if signed[2] != REGION:
            return _refuse(start, "400 Bad Request", "AuthorizationHeaderMalformed")
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE") and path.startswith(f"/{READ_ONLY}/"):
            return _refuse(start, "403 Forbidden", "AccessDenied")
        if self._happens(self._faults.slow_down):
            return _refuse(start, "503 Service Unavailable", "SlowDown")
        if self._happens(self._faults.reset):
            return _break(environ)
        answer = self._app(environ, start)
        if self._happens(self._faults.lose_answer):
            for _ in answer:
                pass
            return _break(environ)
        return answer

    def _happens(self, share: float) -> bool:
        return share > 0 and self._random.random() < share


def _refuse(start: _Start, status: str, code: str) -> list[bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>in a test</Message></Error>".encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def _break(environ: _Environ) -> list[bytes]:
    import socket

    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return []


def serve() -> None:
    """Serve until standard input ends. Prints the port."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", 0, _Manners(DomainDispatcherApplication(create_backend_app)), threaded=True)
    print(server.server_port, flush=True)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    serve()
