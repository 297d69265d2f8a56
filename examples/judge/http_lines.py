"""Takes a consumer's lines by HTTP, and prints them for the judge: for connectors, which call and have no output.

    headwater judge -- python examples/judge/http_lines.py ./my-connector --url '{connection}'

The consumer finds the address in JUDGE_URL, and posts lines there as the judge wants them, one or many at a time. They
are printed before the answer is sent. When the consumer ends, this ends with its exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY_BYTES_MAX = 16 * 1024 * 1024
_turn = threading.Lock()


class Lines(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send up to {BODY_BYTES_MAX} bytes at a time")
            return
        body = self.rfile.read(int(length)).rstrip(b"\n") + b"\n"
        # One body after the other: lines of two requests must not mix.
        with _turn:
            sys.stdout.buffer.write(body)
            sys.stdout.buffer.flush()
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """The judge shows standard error when a consumer fails: requests would fill it."""


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("Error: give the command of the consumer")
    with ThreadingHTTPServer(("127.0.0.1", 0), Lines) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        code = subprocess.call(sys.argv[1:], stdout=sys.stderr, env={**os.environ, "JUDGE_URL": url})
        server.shutdown()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
