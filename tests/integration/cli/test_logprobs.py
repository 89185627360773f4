"""`doctor --logprobs`: finished samples of a real run, scored by an engine over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.cli.__main__ import main
from rollstream.queue import calls
from rollstream.sample import Sample
from tests.backstage import Backstage
from tests.builders import a_sample
from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.faults import FaultConfig
from worker.engines.sim.http import Exchange, port_of, serve
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import SimEngine


@contextmanager
def serving(handle: Callable[[Exchange], None]) -> Iterator[str]:
    """Serve in a thread with a loop of its own: the command line waits in this one."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(serve(handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port_of(server)}"
    finally:
        asyncio.run_coroutine_threadsafe(_settle(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _settle(server: asyncio.Server) -> None:
    """Close, and see what clients closed: a loop that ends before leaves their sockets open."""
    server.close()
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {"What is 3 + 4?": "7"})


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[str]:
    quick = FaultConfig(latency_median_s=0.0, token_s=0.0)
    with serving(SimEngine(policy, faults=quick, weight_version="5").handle) as url:
        yield url


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        yield backstage.open()


def sampled(
    policy: Policy,
    group: int,
    member: int,
    *,
    version: int = 5,
    temperature: float = 1.0,
    change: Callable[[Sample], None] = lambda _: None,
) -> Sample:
    """Return two turns as the engine's policy samples them."""
    text = f"<|im_start|>user\nWhat is 3 + {group}?<|im_end|>\n<|im_start|>assistant\n"
    tokens = policy.vocabulary.encode_reply(text).tolist()[:-1]
    prompt = list(tokens)
    turns, log_probs = [], []
    for turn in range(2):
        asked = {"seed": 10 * member + turn, "max_new_tokens": 64, "temperature": temperature}
        ids, values = policy.expected(tokens, asked)
        observed = policy.vocabulary.encode_reply("\n<|im_start|>user\nso?").tolist()
        observed += policy.vocabulary.encode_reply("\n<|im_start|>assistant\n").tolist()[:-1]
        turns.append((ids.tolist(), observed if turn == 0 else []))
        tokens += [*turns[-1][0], *turns[-1][1]]
        log_probs += [*values.tolist(), *[0.0] * len(turns[-1][1])]
    sample = a_sample(
        group, member, prompt_ids=prompt, turns=turns, versions=version, temperature=temperature,
        reward=float(member), rollout_log_probs=np.array(log_probs, np.float32),
    )  # fmt: skip
    change(sample)
    return sample


def doctor(
    capsys: pytest.CaptureFixture[str], run: Backstage, url: str, *more: str
) -> tuple[int, dict[str, Any]]:
    argv = ["doctor", "--redis", url, "--run", run.queue.run, "--logprobs", "64", "--json", *more]
    code = main(argv)
    out, _ = capsys.readouterr()
    return code, json.loads(out)


def logprob_findings(answer: dict[str, Any]) -> list[str]:
    found = [f for f in answer["findings"] if f["check"] == "logprobs"]
    return [f["what"] for f in found if f["level"] == "problem"]


def test_samples_that_the_engine_would_sample_again_are_all_equal(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.finish(0, 1, make=lambda g, m: sampled(policy, g, m))
    before = run.keys()
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    found = answer["facts"]["logprobs"]
    assert logprob_findings(answer) == []
    assert (found["chosen"], found["samples"], found["served_versions"]) == (4, 4, [5])
    assert found["compared"] > 4 * 20
    (row,) = found["rows"]
    assert (row["version"], row["relation"], row["max"]) == (5, "same", 0.0)
    assert found["first"] is None
    assert run.keys() == before, "the run was changed"


def test_groups_in_the_trainers_hand_and_groups_not_judged_are_read_too(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.finish(0, 1, make=lambda g, m: sampled(policy, g, m))
    run.queue.call(calls.connect("c", 1))
    run.queue.call(calls.deliver("c", ["0"]))
    run.enqueue(2)
    run.complete(run.lease(), lambda g, m: sampled(policy, g, m))  # full, and nobody judges it
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    assert answer["facts"]["logprobs"]["samples"] == 6
    assert logprob_findings(answer) == []


def test_as_many_samples_are_scored_as_were_asked_for(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.finish(0, 1, make=lambda g, m: sampled(policy, g, m))
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine, "--logprobs", "3")
    assert answer["facts"]["logprobs"]["samples"] == 3


def log_probs_shifted_by_one(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    first = sample.calls[0]
    start, end = first.start - sample.prompt_length, first.end - sample.prompt_length
    sample.rollout_log_probs[start:end] = np.roll(sample.rollout_log_probs[start:end], 1)


def one_token_of_the_prompt_lost(sample: Sample) -> None:
    sample.tokens[1] = sample.tokens[2]


@pytest.mark.parametrize("change", [log_probs_shifted_by_one, one_token_of_the_prompt_lost])
def test_log_probs_that_are_not_the_tokens_own_are_a_problem_with_the_first_position(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str], change: Callable[[Sample], None],
) -> None:  # fmt: skip
    run.finish(0, make=lambda g, m: sampled(policy, g, m, change=change))
    code, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    assert code == 1
    (problem,) = logprob_findings(answer)
    assert "version 5" in problem
    first = answer["facts"]["logprobs"]["first"]
    sample = sampled(policy, 0, int(first["sample"][-1]), change=change)
    assert first["id"] == sample.tokens[first["position"]]
    assert abs(first["sampled"] - first["scored"]) > 0.05


def test_older_samples_are_told_apart_and_are_no_problem(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def make(group: int, member: int) -> Sample:
        return sampled(policy, group, member, version=4, change=log_probs_shifted_by_one)

    run.finish(0, make=make)
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    found = answer["facts"]["logprobs"]
    assert logprob_findings(answer) == []
    assert [row["relation"] for row in found["rows"]] == ["older"]
    assert found["compared"] == 0
    notes = [f["what"] for f in answer["findings"] if f["check"] == "logprobs"]
    assert notes == ["no position could be compared"]


def test_the_mode_is_told_from_samples_of_two_temperatures(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.finish(0, make=lambda g, m: sampled(policy, g, m, temperature=(1.0, 0.6)[m]))
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    found = answer["facts"]["logprobs"]
    assert (found["mode"], found["recorded_modes"]) == ("temperature", ["temperature"])
    assert found["not_comparable"]["temperature"] > 0
    assert logprob_findings(answer) == []


def test_raw_log_probs_that_say_temperature_are_a_problem(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def make(group: int, member: int) -> Sample:
        sample = sampled(policy, group, member)
        for call in sample.calls:
            call.sampling["temperature"] = 0.6
        return sample

    run.finish(0, make=make)
    code, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    assert code == 1
    assert logprob_findings(answer) == [
        "samples say that their log-probs are temperature, and they are raw"
    ]


def test_the_table_for_people_has_the_same_figures(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.finish(0, make=lambda g, m: sampled(policy, g, m, change=log_probs_shifted_by_one))
    main(["doctor", "--redis", valkey_url, "--logprobs", "2", "--engine", engine,
          "--run", run.queue.run])  # fmt: skip
    out, _ = capsys.readouterr()
    assert "log-probs: 2 samples scored by" in out
    assert "weight version 5" in out
    assert " same " in out
    assert "first above 0.05: sample 0:" in out
    assert "mode: unknown (at temperature 1 both modes give the same values)" in out


def test_an_engine_that_answers_nothing_is_a_problem_and_asked_once(
    run: Backstage, policy: Policy, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(0, 1, make=lambda g, m: sampled(policy, g, m))
    code, answer = doctor(capsys, run, valkey_url, "--engine", "http://127.0.0.1:9")
    assert code == 1
    (problem,) = logprob_findings(answer)
    assert problem.startswith("1 samples: ")
    assert "refused" in problem


def test_an_engine_that_scores_other_tokens_is_a_problem(
    run: Backstage, policy: Policy, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(0, make=lambda g, m: sampled(policy, g, m))

    def handle(exchange: Exchange) -> None:
        asked = json.loads(exchange.body)
        ids = [i + 1 for i in asked["input_ids"][asked["logprob_start_len"] :]]
        entries = [[-0.5, i, None] for i in ids]
        exchange.answer(200, json.dumps({"meta_info": {"input_token_logprobs": entries}}).encode())

    with serving(handle) as url:
        code, answer = doctor(capsys, run, valkey_url, "--engine", url)
    assert code == 1
    assert any("token alignment mismatch" in what for what in logprob_findings(answer))


def test_a_refusal_is_quoted(
    run: Backstage, policy: Policy, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(0, make=lambda g, m: sampled(policy, g, m))
    with serving(lambda exchange: exchange.answer(400, b'{"error":"too long"}')) as url:
        code, answer = doctor(capsys, run, valkey_url, "--engine", url)
    assert code == 1
    assert logprob_findings(answer) == ['2 samples: status 400: {"error":"too long"}']


@pytest.mark.parametrize("more", [(), ("--engine", "127.0.0.1:30000")])
def test_without_an_engine_that_scores_nothing_is_done(
    run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    argv = ["doctor", "--redis", valkey_url, "--run", run.queue.run, "--logprobs", "4", *more]
    assert main(argv) == 2
    assert "--engine http://host:port" in capsys.readouterr().err


def test_the_engine_of_the_configuration_scores_where_none_is_named(
    run: Backstage, policy: Policy, engine: str, valkey_url: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.finish(0, make=lambda g, m: sampled(policy, g, m))
    config = tmp_path / "rollstream.toml"
    config.write_text(
        f'[run]\nname = "{run.queue.run}"\n[redis]\nurl = "{valkey_url}"\n'
        f'[engine]\nurls = ["{engine}"]\n'
    )
    main(["doctor", "--config", str(config), "--logprobs", "8", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["facts"]["logprobs"]["engine"] == engine
    assert answer["facts"]["logprobs"]["samples"] == 2


def test_no_proxy_stands_between_doctor_and_an_engine(
    run: Backstage, policy: Policy, engine: str, valkey_url: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run.finish(0, make=lambda g, m: sampled(policy, g, m))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr("urllib.request._opener", None)  # made once, of the environment then
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    assert answer["facts"]["logprobs"]["samples"] == 2


def test_a_run_without_samples_has_nothing_to_compare_and_says_so(
    run: Backstage, engine: str, valkey_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.enqueue(0)
    _, answer = doctor(capsys, run, valkey_url, "--engine", engine)
    assert answer["facts"]["logprobs"]["samples"] == 0
    assert "no position could be compared" in [f["what"] for f in answer["findings"]]
