"""Environments of a real OpenEnv server, in a process of its own, through the package's client."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import free_port
from rollstream.errors import ConfigError, EnvFault, StopReason
from rollstream.sample import Sample
from tests.generate_stage import check, chunks_of
from tests.integration.worker.processes import start, wait_for_url
from tests.unit.environments.stage import ASKED, END, play, settled
from worker.environments.load import LoadedEnvironment, load_environment

pytestmark = pytest.mark.slow
SESSIONS = 2
GEN = "<|im_start|>assistant\n"


@dataclass
class Server:
    """One server on a port of its own."""

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        self.port = self.port or free_port()
        log = self.folder / "openenv.log"
        module = "tests.integration.environments.openenv_server"
        self.process = start(module, str(self.port), str(SESSIONS), log=log)
        wait_for_url(f"{self.url}/health", self.process, log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("openenv"))
    running.begin()
    yield running
    running.kill()


async def game(
    server: Server, query: str = "?observation=text", timeout_s: float = 30.0
) -> LoadedEnvironment:
    """Return the environment as a worker has it, started."""
    loaded = load_environment(f"openenv:{server.url}{query}", timeout_s=timeout_s)
    assert loaded.start is not None
    await loaded.start()
    return loaded


def a_row(**metadata: Any) -> Sample:
    return Sample(group_index=3, index=3, rollout_id=3, prompt=ASKED, metadata=metadata)


async def test_an_episode_is_one_sample_with_the_servers_rewards(
    server: Server, qwen3: Any
) -> None:
    played = await play(qwen3, await game(server), "2", "6", "7")
    sample = played.sample
    check(sample, played.asked, played.replies)
    assert [text for text, mask in chunks_of(sample, qwen3.decode) if not mask] == [
        f"\n<|im_start|>user\nNo, {left} left.{END}\n{GEN}" for left in (2, 1)
    ]
    notes = sample.metadata["env"]
    assert (notes["rewards"], notes["done"]) == ([0.0, 0.1, 1.0], True)
    assert (sample.reward, sample.stop_reason) == (1.1, StopReason.STOP)
    [first] = notes["reset"]
    assert first["content"].startswith("Guess. The seed is ")
    expected = qwen3.render([*ASKED, first], None).tolist()
    assert sample.tokens[: sample.prompt_length].tolist() == expected


async def test_members_of_a_group_begin_alike_and_a_row_has_parameters_of_reset(
    server: Server, qwen3: Any
) -> None:
    environment = await game(server)
    first = [
        (await play(qwen3, environment, "7", member=member)).sample.metadata["env"]["reset"]
        for member in (0, 1)
    ]
    assert first[0] == first[1]
    row = a_row(openenv={"number": 3, "seed": 11})
    sample = (await play(qwen3, environment, "3", sample=row)).sample
    assert sample.reward == 1.0
    assert sample.metadata["env"]["reset"][0]["content"] == "Guess. The seed is 11."


async def test_all_fields_are_json_where_none_is_named(server: Server, qwen3: Any) -> None:
    environment = await game(server, "?action=guess")
    sample = (await play(qwen3, environment, "2", "7")).sample
    assert '{"text": "No, 2 left.", "left": 2}' in sample.response


async def test_what_the_server_does_not_take_is_an_observation_and_costs_no_try(
    server: Server, qwen3: Any
) -> None:
    played = await play(qwen3, await game(server), "seven", "7")
    sample = played.sample
    check(sample, played.asked, played.replies)
    assert "Error: this is no valid action" in sample.response
    notes = sample.metadata["env"]
    assert (notes["rewards"], notes["infos"]) == ([None, 1.0], [{"invalid": True}, {}])


async def test_what_the_server_breaks_is_an_env_fault_and_its_session_ends(
    server: Server, qwen3: Any
) -> None:
    environment = await game(server)
    for _ in range(SESSIONS + 1):  # a session that stayed would leave none
        with pytest.raises(EnvFault, match="EXECUTION_ERROR") as caught:
            await play(qwen3, environment, "boom")
        assert (caught.value.retryable, caught.value.detail) == (True, "raised")


async def test_a_server_that_is_full_is_asked_again_and_then_is_an_env_fault_that_says_so(
    server: Server, qwen3: Any
) -> None:
    from openenv.core.generic_client import GenericEnvClient  # seconds, for slow tests alone

    clients = [GenericEnvClient(server.url) for _ in range(SESSIONS)]
    for client in clients:
        await client.reset()
    impatient = await game(server, timeout_s=3.0)
    with pytest.raises(EnvFault, match="max_concurrent_envs") as caught:
        await play(qwen3, impatient, "7")
    assert (caught.value.retryable, caught.value.detail) == (True, "full")

    refused = 0
    environment = await game(server)

    async def make(sample: Any) -> Any:
        nonlocal refused
        env = await environment.make(sample)
        ask = env._unless_full

        async def counted(parameters: Any) -> Any:
            nonlocal refused
            answer = await ask(parameters)
            refused += answer is None
            return answer

        env._unless_full = counted
        return env

    playing = asyncio.create_task(play(qwen3, LoadedEnvironment("test", make), "7"))
    await settled(lambda: refused > 1, what="asked again")
    await clients[0].close()
    assert (await playing).sample.reward == 1.0
    await clients[1].close()


async def test_a_server_that_hangs_or_dies_is_an_env_fault_and_one_in_its_place_goes_on(
    tmp_path: Path, qwen3: Any
) -> None:
    server = Server(tmp_path)
    server.begin()
    try:
        impatient = await game(server, timeout_s=4.0)
        with pytest.raises(EnvFault, match="step did not return within 4 s") as caught:
            await play(qwen3, impatient, "hang", timeout_s=4.0)
        assert (caught.value.retryable, caught.value.detail) == (True, "timeout")
        environment = await game(server)
        server.kill()
        with pytest.raises(EnvFault, match="reset raised ConnectionError") as caught:
            await play(qwen3, environment, "7")
        assert caught.value.retryable
        server.begin()
        assert (await play(qwen3, environment, "7")).sample.reward == 1.0
    finally:
        server.kill()


async def test_start_up_says_what_is_wrong(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for query, says in (
        ("?action=gess", "no field 'gess'; they have guess"),
        ("?observation=txt", "no field 'txt'; they have"),
    ):
        with pytest.raises(ConfigError, match=says):
            await game(server, query)
    monkeypatch.setattr("worker.environments.openenv.START_S", 0.5)
    gone = Server(Path(), port=free_port())
    with pytest.raises(ConfigError, match="no OpenEnv server answers within 0\\.5 s"):
        await game(gone)
