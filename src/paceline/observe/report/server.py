"""Server of a report that is made anew while its runs go on: on this machine alone, read only, one page.

It listens on 127.0.0.1, answers GET and HEAD of its one path, and only where the Host header is its own address: a page
of another site that resolves its name to 127.0.0.1 (DNS rebinding) gets nothing. Nothing of a request is used to find a
file. The page asks for its own state every few seconds, and loads itself anew when there is more to see.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.core.errors import Busy, PacelineError

LOOPBACK = "127.0.0.1"
REFRESH_S = 3
"""Pause between two questions of the page for something new."""
PAGE_PATH, STATE_PATH = "/", "/state"


class Live:
    """The newest page: made again when it is requested and its runs have written more, by one request at a time."""

    def __init__(self, version: Callable[[], tuple[str, bool]], make: Callable[[str], str]) -> None:
        """`version` returns cheaply what there is to see, and if more may come; `make` makes the page of a version."""
        self.state, self._make = version, make
        self._lock = threading.Lock()
        self._version, self._page = "", ""

    def newest(self) -> str:
        with self._lock:
            version, _ = self.state()
            if version != self._version:
                self._version, self._page = version, self._make(version)
            return self._page


class Server(ThreadingHTTPServer):
    """One thread per request, none of which is waited for at the end."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that went away; whatever else goes wrong is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve(live: Live, port: int = 0) -> Server:
    """Return a server that listens and is not running yet: call `serve_forever`."""
    try:
        return Server((LOOPBACK, port), _handler(live))
    except OSError as error:
        raise Busy(
            f"port {port} of {LOOPBACK} cannot be used: {error.strerror or error}",
            hint="name another `--port`, or leave it out: a free one is found",
        ) from error


def address(server: Server) -> str:
    return f"http://{LOOPBACK}:{server.server_address[1]}{PAGE_PATH}"


def _answer(live: Live, port: int, host: str | None, path: str) -> tuple[HTTPStatus, str, str]:
    """Return status, type and text of the answer to a request."""
    if host not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):  # a name that was pointed to this address
        return HTTPStatus.FORBIDDEN, "text/plain", "served to this machine alone\n"
    if path == STATE_PATH:
        version, is_going_on = live.state()
        return HTTPStatus.OK, "application/json", json.dumps({"version": version, "goes_on": is_going_on})
    if path != PAGE_PATH:
        return HTTPStatus.NOT_FOUND, "text/plain", "there is one page, /\n"
    try:
        return HTTPStatus.OK, "text/html", live.newest()
    except PacelineError as error:  # a run that is being moved or removed
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n"


def _handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "paceline", ""
        timeout = 30

        def do_GET(self) -> None:
            port = self.connection.getsockname()[1]
            status, kind, text = _answer(live, port, self.headers.get("Host"), self.path)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Do not print requests."""

    return Handler
