"""`paceline report --watch` as it is typed: who is answered, what is refused, when the page is made anew."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.observe.report.server import Live, Server, serve
from paceline.observe.report.watch import make_page, seen
from tests.observe.report.browser import look
from tests.observe.report.made import step, usual, write_run

pytest.importorskip("plotly", reason="plotly is not installed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", usual(), status="running")


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with serve(Live(lambda: seen([run]), lambda version: make_page([run], [], version))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(port: int, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def append(run: Path, record: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_the_page_is_made_anew_when_the_run_has_written_more(server: Server, run: Path) -> None:
    port = server.server_address[1]
    status, page, headers = ask(port)
    assert status == 200
    assert "<h1>a</h1>" in page
    assert headers["Cache-Control"] == "no-store"
    version = re.search(r'data-version="(\w+)"', page)[1]  # type: ignore[index]
    assert json.loads(ask(port, "/state")[1]) == {"version": version, "goes_on": True}
    append(run, step(4, 0.75))
    assert json.loads(ask(port, "/state")[1])["version"] != version
    assert ">5<" in ask(port)[1], "five steps now"
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "finished"}))
    assert json.loads(ask(port, "/state")[1])["goes_on"] is False


def test_strangers_get_nothing(server: Server, run: Path) -> None:
    """A page of another site may point its own name at 127.0.0.1, or ask for files of this machine."""
    (run / "secret.txt").write_text("secret")
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "localhost:1", "", f"[::1]:{port}"):
        assert ask(port, host=host or "-")[0] == 403
    assert ask(port, host=f"localhost:{port}")[0] == 200
    for path in ("/secret.txt", "/../run.json", "/%2e%2e/run.json", "//etc/passwd", "/run.json", "/?x", "http://a/"):
        status, text, _ = ask(port, path)
        assert (status, "secret" in text) == (404, False)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        assert ask(port, "/", method)[0] == 501
    assert ask(port, "/", "HEAD")[:2] == (200, "")


def test_evil_texts_of_a_run_stay_texts_on_the_page(server: Server, run: Path) -> None:
    evil = "<script>alert(1)</script>"
    append(run, {"kind": "validation", "step": 3, f"{evil}/loss": 1.0, "samples": {evil: [{evil: evil}]}})
    page = ask(server.server_address[1])[1]
    assert "<script>alert" not in page
    assert "connect-src 'self'" in page


def test_a_browser_shows_it(server: Server, tmp_path: Path) -> None:
    seen_page = look(f"http://127.0.0.1:{server.server_address[1]}/", tmp_path / "profile")
    assert seen_page.complaints == []
    assert "data-drawn=" in seen_page.document


def test_the_command_waits_for_steps_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [], status="running")
    command = [sys.executable, "-m", "paceline", "report", str(run), "--watch"]
    # Shells start background jobs with Ctrl-C ignored, and children would inherit that.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, ignored)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)", line)[1])  # type: ignore[index]
        assert "has no steps yet" in ask(port)[1]
        for record in usual():
            append(run, record)
        assert "<h1>a</h1>" in ask(port)[1]
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, errors) == (0, "ended; the runs go on\n", "")
    assert not (run / "report.html").exists()


def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, said in (
            ([run, "--watch", "--port", port], f"port {port} of 127.0.0.1 cannot be used"),
            ([run, "--watch", "--out", "x.html"], "leave one of them out"),
            ([run, "--port", port], "has no effect without"),
            ([run, "--watch", "--port", "0"], "--port"),
            ([tmp_path / "absent", "--watch"], "there is no folder"),
        ):
            assert main(["report", *map(str, words)]) == 2
            errors = capsys.readouterr().err
            assert said in errors
            assert "Traceback" not in errors
