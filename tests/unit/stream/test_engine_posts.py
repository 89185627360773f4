"""POSTs to engines: what arrives, what an engine that does not take it costs, and the bound."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollstream.updates.engine_posts import Posted, post_all


class Handler(BaseHTTPRequestHandler):
    """Keeps what it was sent; answers what its server says."""

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers["content-length"]))
        server.got.append((self.path, json.loads(body)))
        server.inside.set()
        if server.hold is not None:
            server.hold.wait(20)
        status, reply = server.answer
        if status == 200 and self.path == "/update_weight_version":
            server.label = json.loads(body)["new_version"]
        self.send_response(status)
        if status == 302:
            self.send_header("location", "/elsewhere")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        if self.path == server.label_path:
            reply = json.dumps({"weight_version": server.label}).encode()
            self.send_response(200)
        else:
            reply = b""
            server.got.append((self.path, "GET"))
            self.send_response(404)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """An engine that keeps what it was told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, object]] = []
        self.answer: tuple[int, bytes] = (200, b"{}")
        self.label: object = "default"
        self.label_path = "/model_info"
        self.hold: threading.Event | None = None
        self.inside = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def engines(count: int) -> Iterator[list[Server]]:
    servers = [Server() for _ in range(count)]
    threads = [threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01})
               for s in servers]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        yield servers
    finally:
        for server, thread in zip(servers, threads, strict=True):
            if server.hold is not None:
                server.hold.set()
            server.shutdown()
            thread.join()
            server.server_close()


def test_post_all_tells_every_engine_once_the_same() -> None:
    with engines(3) as found:
        urls = [found[0].url, found[1].url + "/", found[2].url, found[0].url]
        answers = post_all(urls, "/update_weight_version", {"new_version": "7"}, timeout_s=10)
        assert answers == [Posted(url) for url in urls[:3]]
        for engine in found:
            assert engine.got == [("/update_weight_version", {"new_version": "7"})]


def test_post_all_waits_for_no_engine_before_it_asks_the_next() -> None:
    with engines(4) as found:
        for engine in found:
            engine.hold = threading.Event()
        posting = threading.Thread(
            target=post_all, args=([e.url for e in found], "/x", {}), kwargs={"timeout_s": 10}
        )
        posting.start()
        assert all(engine.inside.wait(10) for engine in found)
        for engine in found:
            assert engine.hold is not None
            engine.hold.set()
        posting.join(10)
        assert not posting.is_alive()


@pytest.mark.parametrize(
    ("status", "reply", "said"),
    [
        (404, b'{"detail":"Not Found"}', 'HTTP 404: {"detail":"Not Found"}'),
        (500, b"", "HTTP 500"),
        (503, b"a\n\x1b[31mb" * 500, "HTTP 503: a [31mba"),
        (302, b"", "HTTP 302"),
    ],
)
def test_post_all_says_what_an_engine_answered(status: int, reply: bytes, said: str) -> None:
    with engines(2) as found:
        found[0].answer = (status, reply)
        first, second = post_all([e.url for e in found], "/x", {}, timeout_s=10)
        assert first.error.startswith(said)
        assert len(first.error) < 300
        assert second.error == ""
        assert [path for path, _ in found[0].got] == ["/x"]


def test_post_all_says_which_engine_is_not_there_or_hangs() -> None:
    with engines(2) as found:
        found[0].hold = threading.Event()
        gone = Server()
        gone.server_close()
        urls = [found[0].url, gone.url, "no-url", found[1].url]
        held, refused, none, fine = post_all(urls, "/x", {}, timeout_s=0.3)
        assert held.error
        assert "refused" in refused.error
        assert "unknown url type" in none.error
        assert fine == Posted(found[1].url)


def test_post_all_hides_a_password_of_a_url() -> None:
    (one,) = post_all(["http://me:secret@127.0.0.1:1"], "/x", {}, timeout_s=5)
    assert one.error
    assert "secret" not in one.error
