"""A worker whose model calls an MCP server that is gone for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.devserver import DevServer
from examples.mcp_tools import stack
from rollstream import GroupStream
from rollstream.sample import Sample
from tests.backstage import wait_until

pytestmark = pytest.mark.slow

GROUPS, N = 20, 2


def test_no_group_is_lost_to_an_mcp_server_that_is_gone_for_a_while(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    samples: list[Sample] = []
    with (
        DevServer() as redis,
        stack(redis.url, tmp_path, groups=GROUPS, n=N) as children,
    ):
        children["mcp-server"].kill()
        children["producer"].start()
        wait_until(lambda: "mcp_server_down" in log.read_text())
        children["mcp-server"].start()
        with GroupStream.connect(redis.url, run="mcp", connect_timeout_s=60.0) as stream:
            for batch in stream.batches(groups=1, timeout_s=60.0):
                (group,) = batch.groups
                assert not group.missing, group.missing
                samples += (sample for sample in group.samples if isinstance(sample, Sample))
                batch.ack()
                if batch.number == GROUPS:
                    break
    assert len(samples) == GROUPS * N
    assert "mcp_server_back" in log.read_text()
    errors = [sample.metadata.get("tool_errors", {}) for sample in samples]
    # The outage is nobody's text: no model read of it, and none was rewarded for it.
    assert {label for error in errors for label in error} <= {"malformed", "raised"}
    assert sum(sample.metadata.get("tool_calls_ok", 0) for sample in samples) > 0
