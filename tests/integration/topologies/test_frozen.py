"""A server that takes connections and says nothing: waits end when their callers want them to.

Each of these waits once had a bound of its own near 30 s; together they would not end within the
time that a test has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.devserver import DevServer
from rollstream.cli.__main__ import main
from rollstream.errors import StreamError, StreamStalled
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage

from .servers import freeze, thaw


@pytest.fixture
def server() -> Iterator[DevServer]:
    with DevServer() as server:
        yield server
        thaw(server)


@pytest.mark.slow
def test_a_silent_server_holds_a_trainer_no_longer_than_the_trainer_wants(
    server: DevServer, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Backstage(server.url, run_name) as backstage:
        backstage.open().finish(0, 1, 2)
        backstage.end_of_data()
        with GroupStream.connect(server.url, run=run_name) as stream:
            first = stream.next_batch(1, 5)
            assert first is not None
            freeze(server)
            with pytest.raises(StreamStalled, match="did not answer for 1 s"):
                stream.next_batch(3, 1.0)
            with pytest.raises(StreamError, match="cannot be reached"):
                stream.ack(first, timeout_s=0.5)
            assert "stream/acked" not in stream.metrics()
            with pytest.raises(StreamError, match="cannot be reached"):
                GroupStream.connect(server.url, run=run_name, connect_timeout_s=0.5)
            asked = ["stats", "--redis", server.url, "--run", run_name, "--timeout-s", "1"]
            assert main(asked) == 3
            thaw(server)
            first.ack()
            rest = [batch.group_indexes for batch in stream.batches(groups=2, timeout_s=5)]
        assert first.group_indexes + rest[0] == [0, 1, 2]
        assert backstage.queue.call(calls.audit(deep=True)).problems == []
    assert "cannot be reached" in capsys.readouterr().err
