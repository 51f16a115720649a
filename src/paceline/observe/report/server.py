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
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.core.errors import Busy, PacelineError

LOOPBACK = "127.0.0.1"
REFRESH_S = 3
"""Pause between two questions of the page for something new."""
PAGE_PATH, STATE_PATH = "/", "/state"


@dataclass(frozen=True)
class Snapshot:
    """A page, and what it was made of."""

    page: str
    version: str
    """Another one where there is more to see."""
    is_going_on: bool
    """True while a run writes on."""


class Live:
    """The newest page: made anew when it is asked for and its runs have written more, by one request at a time."""

    def __init__(self, version: Callable[[], tuple[str, bool]], make: Callable[[str], str]) -> None:
        """`version` tells cheaply what there is to see, and if more may come; `make` makes the page of a version."""
        self._version, self._make = version, make
        self._lock = threading.Lock()
        self._newest: Snapshot | None = None

    def state(self) -> tuple[str, bool]:
        return self._version()

    def newest(self) -> Snapshot:
        with self._lock:
            version, is_going_on = self._version()
            if self._newest is None or self._newest.version != version:
                self._newest = Snapshot(self._make(version), version, is_going_on)
            return self._newest


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


def is_own_host(host: str | None, port: int) -> bool:
    """Return True if a Host header names this server, and not a name that somebody has pointed to it."""
    return host in (f"{LOOPBACK}:{port}", f"localhost:{port}")


def _handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "paceline", ""
        timeout = 30

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            port = self.connection.getsockname()[1]
            if not is_own_host(self.headers.get("Host"), port):
                self._send(HTTPStatus.FORBIDDEN, "served to this machine alone\n", "text/plain", with_body)
            elif self.path == PAGE_PATH:
                self._send_page(with_body)
            elif self.path == STATE_PATH:
                version, is_going_on = live.state()
                text = json.dumps({"version": version, "goes_on": is_going_on})
                self._send(HTTPStatus.OK, text, "application/json", with_body)
            else:
                self._send(HTTPStatus.NOT_FOUND, "there is one page, /\n", "text/plain", with_body)

        def _send_page(self, with_body: bool) -> None:
            try:
                page = live.newest().page
            except PacelineError as error:  # a run that is just being moved or removed
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n", "text/plain", with_body)
            else:
                self._send(HTTPStatus.OK, page, "text/html", with_body)

        def _send(self, status: HTTPStatus, text: str, kind: str, with_body: bool) -> None:
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
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not shown."""

    return Handler
