"""Users that may do what docs/deploy.md gives them and no more, and what is said of less."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from examples.devserver import DevServer
from rollstream.errors import StreamError
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.producer.scene import rows_file
from tests.integration.worker.parts import Parts
from tests.integration.worker.processes import start
from tests.proxy import Proxy
from worker.isolation import Isolated

from .servers import MASTER, Sentinel, answers, told

ROOT = Path(__file__).parents[3]
TLS = ROOT / "tests" / "data" / "tls"
LINES = re.findall(r"^ACL SETUSER .*$", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE)


@pytest.fixture
def server() -> Iterator[DevServer]:
    with DevServer() as server:
        yield server


def add_user(server: DevServer, name: str, run: str, *changes: str, line: int = 0) -> str:
    """Add a user as the documentation says, with changes; the URL with it."""
    words = LINES[line].replace("{demo}", "{" + run + "}").split()
    words[2:5] = [name, "on", ">pw"]
    with told(server.port) as client:
        client.execute_command(*words, *changes)
    return f"redis://{name}:pw@127.0.0.1:{server.port}"


def close_to_others(server: DevServer) -> None:
    """Take everything from the user that needs no password."""
    with told(server.port) as client:
        client.execute_command("ACL SETUSER", "boss", "on", ">boss", "~*", "+@all")
        client.execute_command("ACL SETUSER", "default", "off")


@pytest.mark.slow
async def test_producer_worker_and_trainer_need_no_more_than_the_documented_user(
    server: DevServer, run_name: str, tmp_path: Path
) -> None:
    users = {role: add_user(server, role, run_name) for role in ("producer", "worker", "trainer")}
    close_to_others(server)
    log = tmp_path / "producer.log"
    producer = start(
        "producer", "--redis.url", users["producer"], "--run.name", run_name,
        "--producer.source", f"jsonl:{rows_file(tmp_path, 12)}",
        "--producer.n_samples_per_prompt", "2", "--producer.capacity_groups", "4", log=log,
    )  # fmt: skip
    worker = start(  # a whole process too: what it asks for at its start is not in its parts
        "worker", "--redis.url", users["worker"], "--run.name", run_name, "--worker.role",
        "aggregator", "--telemetry.metrics_port", "0", log=tmp_path / "worker.log",
    )  # fmt: skip
    queue = Queue.connect(users["worker"], run_name)
    parts = Parts(queue)
    try:
        with GroupStream.connect(users["trainer"], run=run_name, connect_timeout_s=15) as stream:
            parts.start()
            trained: list[int] = []

            def train() -> None:
                for batch in stream.batches(groups=2, timeout_s=45):
                    batch.ack()
                    trained.extend(batch.group_indexes)
                    stream.set_weight_version(len(trained))
                    stream.state_dict()

            await asyncio.to_thread(train)
            assert sorted(trained) == list(range(12))
            state = stream.state_dict()
        with GroupStream.connect(users["trainer"], run=run_name, state=state) as stream:
            stream.abort_run("done")
        assert await asyncio.to_thread(producer.wait, 15) == 0, log.read_text()
        assert await asyncio.to_thread(worker.wait, 15) == 0
        # Nothing outside of the run: neither another one, nor the server itself.
        for command in (("GET", "x"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"),
                        ("HGETALL", "rs:{other}:m"), ("ACL", "LIST")):  # fmt: skip
            with pytest.raises(NoPermissionError):
                await queue.client.execute_command(*command)
    finally:
        await parts.stop()
        await queue.aclose()
        for process in (producer, worker):
            process.kill()
            process.wait()


def test_a_trainer_and_a_worker_name_the_right_that_is_missing(
    server: DevServer, run_name: str, tmp_path: Path
) -> None:
    with Backstage(server.url, run_name) as backstage:
        backstage.open()
    for taken in ("xadd", "hgetall"):  # inside a script, and a command of its own
        url = add_user(server, "poor", run_name, f"-{taken}")
        with pytest.raises(StreamError, match=f"refuses this client.*'{taken}'"):
            GroupStream.connect(url, run=run_name, connect_timeout_s=5).abort_run()
    log = tmp_path / "worker.log"
    process = start("worker", "--redis.url", url, "--run.name", run_name, "--worker.role",
                    "aggregator", "--telemetry.metrics_port", "0", log=log)  # fmt: skip
    try:
        assert process.wait(45) == 2
    finally:
        process.kill()
    said = "lacks a right (docs/deploy.md, ACL): User poor has no permissions to run the 'hgetall'"
    assert said in log.read_text()


def test_the_producer_names_a_right_that_is_missing_inside_a_script(
    server: DevServer, run_name: str, tmp_path: Path
) -> None:
    url = add_user(server, "poor", run_name, "-hincrby")
    log = tmp_path / "producer.log"
    process = start("producer", "--redis.url", url, "--run.name", run_name, "--producer.source",
                    f"jsonl:{rows_file(tmp_path, 1)}", log=log)  # fmt: skip
    try:
        assert process.wait(45) == 2
    finally:
        process.kill()
    assert "lacks a right" in log.read_text()
    assert "'hincrby'" in log.read_text()


def test_a_user_without_info_and_scan_works_and_a_missing_run_is_said(
    server: DevServer, run_name: str
) -> None:
    url = add_user(server, "blind", run_name, "-info")
    close_to_others(server)
    with pytest.raises(StreamError, match="may not list others"):
        GroupStream.connect(url, run=run_name, connect_timeout_s=0.3)
    with Backstage(url, run_name) as backstage:
        backstage.open().finish(0)
        backstage.end_of_data()
        with GroupStream.connect(url, run=run_name) as stream:
            assert [batch.group_indexes for batch in stream.batches(1, 5)] == [[0]]
        assert backstage.queue.call(calls.audit(deep=True)).problems == []


@pytest.mark.slow
async def test_jobs_of_isolated_rewards_need_no_more_than_their_user(
    server: DevServer, run_name: str, tmp_path: Path
) -> None:
    ours = add_user(server, "worker", run_name)
    jobs = add_user(server, "jobs", run_name, line=1)
    close_to_others(server)
    log = tmp_path / "verifier.log"
    process = start("worker.isolation.verifier", "--redis.url", ours, "--rq.url", jobs, log=log)
    isolated = Isolated(redis_url=ours, rq_url=jobs, run=run_name, incarnation="0123456789ab")
    try:
        await asyncio.to_thread(wait_until, lambda: "verifier_ready" in log.read_text(), 15)
        payload = {"answer": "8", "label": "8"}
        assert await isolated.call("math_verify", payload, timeout_s=10.0) == 1.0
    finally:
        await isolated.aclose()
        process.kill()
        process.wait()


def test_sentinels_and_master_are_reached_with_tls_and_their_own_passwords(
    server: DevServer, run_name: str
) -> None:
    """The servers at hand speak no TLS themselves, so proxies do for them."""
    add_user(server, "worker", run_name)
    close_to_others(server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    with Proxy(server.port, tls=context) as front:
        # What the sentinel says of the master is where its proxy is.
        sentinel = Sentinel(front.port, 1, "requirepass guarded")
        try:
            wait_until(lambda: answers(sentinel.port, password="guarded"))
            with Proxy(sentinel.port, tls=context) as gate:
                at = f"127.0.0.1:{gate.port}/{MASTER}"
                url = f"rediss+sentinel://worker:pw@{at}?sentinel_password=guarded"
                with Backstage(f"redis://worker:pw@127.0.0.1:{server.port}", run_name) as run:
                    run.open().finish(0)
                    run.end_of_data()
                with GroupStream.connect(
                    url, run=run_name, ca=str(TLS / "ca.pem"), connect_timeout_s=5
                ) as stream:
                    assert [b.group_indexes for b in stream.batches(1, 5)] == [[0]]
                with pytest.raises(StreamError, match="certificate verify failed"):
                    GroupStream.connect(url, run=run_name, connect_timeout_s=0.3)
                wrong = url.replace("guarded", "wrong")
                with pytest.raises(StreamError, match="no sentinel says") as caught:
                    GroupStream.connect(
                        wrong, run=run_name, ca=str(TLS / "ca.pem"), connect_timeout_s=0.3
                    )
                assert "invalid username-password" in str(caught.value).lower()
        finally:
            sentinel.stop()
