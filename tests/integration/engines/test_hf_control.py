"""The hf engine under control calls, faults and signals, over real HTTP."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.demo.children import Child
from tests.backstage import wait_until
from tests.hf import (
    NOISE,
    VOCABULARY,
    Hf,
    Reference,
    need_torch,
    outcome,
    request,
    running,
    until,
    write_model,
)

need_torch()

import torch  # noqa: E402 - only where it is there

from rollstream.errors import EngineFault  # noqa: E402
from worker.engines.faults import Detail  # noqa: E402
from worker.engines.fleet.pool import EnginePool, RetryPolicy  # noqa: E402
from worker.engines.hf.sampler import draw, scores  # noqa: E402
from worker.sampling import Sampling  # noqa: E402
from worker.types import Completion, Finish, RequestIds  # noqa: E402

ROOT = Path(__file__).parents[3]
PROMPT = [1, 21, 10, 1104, 1105, 2, 10, 1, 22, 10]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[Reference]:
    return [Reference(folder) for folder in folders]


@pytest.fixture
def hf(folders: list[Path]) -> Iterator[Hf]:
    with running(folders[0], "--max-batch", "4") as engine:
        yield engine


async def held(hf: Hf, *bodies: dict[str, Any], steps: int) -> list[asyncio.Task[httpx.Response]]:
    """Return requests that are in flight, each after so many steps of a paused engine."""
    await hf.post("/pause_generation", {"mode": "in_place"})
    calls = [asyncio.create_task(hf.post("/generate", body)) for body in bodies]
    await hf.paused_with(waiting=len(bodies))
    hf.pause_after(steps)
    await hf.post("/continue_generation")
    await hf.paused_with(running=len(bodies))
    return calls


async def replies(calls: Sequence[asyncio.Task[httpx.Response]]) -> list[dict[str, Any]]:
    return [response.json() for response in await asyncio.gather(*calls)]


def finish(reply: dict[str, Any]) -> str:
    return str(reply["meta_info"]["finish_reason"]["type"])


async def answer(pool: EnginePool, ids: Sequence[int] = PROMPT, **changes: Any) -> Completion:
    return await pool.generate(
        RequestIds([",".join(map(str, ids)).encode()], len(ids)),
        Sampling(**{"max_new_tokens": 6, "seed": 5, **changes}),
        routing_key="g",
        version=0,
    )


# -- abort


async def test_abort_by_prefix_answers_each_request_with_its_own_tokens(
    hf: Hf, references: list[Reference]
) -> None:
    calls = await held(
        hf,
        *(request(PROMPT, rid=rid, max_new_tokens=30, sampling_seed=i)
          for i, rid in enumerate(("aa1", "aa2", "b1"))),
        steps=4,
    )  # fmt: skip
    assert (await hf.post("/abort_request", {"rid": ""})).status_code == 200
    assert (await hf.post("/abort_request", {"rid": "zz"})).status_code == 200
    await hf.post("/abort_request", {"rid": "aa"})
    for reply in await replies(calls[:2]):
        assert reply["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "Aborted by a request",
            "status_code": None,
            "err_type": None,
        }
        output, log_probs = outcome(reply)
        assert len(output) == 5  # the first step prefills and goes on
        assert log_probs == pytest.approx(references[0].log_probs(PROMPT, output), abs=NOISE)
    await hf.paused_with(running=1)
    await hf.post("/abort_request", {"abort_all": True})
    assert [finish(reply) for reply in await replies(calls[2:])] == ["abort"]


async def test_aborted_request_that_never_ran_has_no_tokens(hf: Hf) -> None:
    await hf.post("/pause_generation", {"mode": "in_place"})
    call = asyncio.create_task(hf.post("/generate", request(PROMPT, rid="w")))
    await hf.paused_with(waiting=1)
    await hf.post("/abort_request", {"rid": "w"})
    (reply,) = await replies([call])
    assert (finish(reply), reply["output_ids"]) == ("abort", [])
    assert reply["meta_info"]["weight_versions"] == []


async def test_aborted_request_goes_on_elsewhere_as_if_nothing_had_been(
    hf: Hf, references: list[Reference]
) -> None:
    whole, _ = outcome(await hf.generate(PROMPT, max_new_tokens=20))
    (call,) = await held(hf, request(PROMPT, rid="x", max_new_tokens=20), steps=6)
    await hf.post("/abort_request", {"rid": "x"})
    part, _ = outcome((await replies([call]))[0])
    await hf.post("/continue_generation")
    rest = await hf.generate([*PROMPT, *part], max_new_tokens=20 - len(part))
    assert part + rest["output_ids"] == whole
    assert rest["meta_info"]["cached_tokens"] == len(PROMPT) + len(part) - 1


async def test_client_that_leaves_aborts_its_request(hf: Hf) -> None:
    (call,) = await held(hf, request(PROMPT, max_new_tokens=200), steps=2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await hf.paused_with(running=0)
    assert (await hf.state())["counts"]["finish_abort"] == 1


async def test_loop_answers_while_a_step_runs(hf: Hf) -> None:
    release, entered = threading.Event(), threading.Event()
    step = hf.batch._step

    def slow() -> None:
        entered.set()
        assert release.wait(40)
        step()

    hf.batch._step = slow  # type: ignore[method-assign]
    call = asyncio.create_task(hf.post("/generate", request(PROMPT, rid="s", max_new_tokens=99)))
    await until(entered.is_set)
    try:
        assert (await hf.get("/model_info")).status_code == 200
        assert (await hf.get("/health")).status_code == 200
        assert (await hf.post("/abort_request", {"rid": "s"})).status_code == 200
        assert not call.done()
    finally:
        release.set()
    (reply,) = await replies([call])
    # What the step sampled before the abort was seen belongs to the request.
    assert (finish(reply), len(reply["output_ids"])) == ("abort", 2)


# -- pause


async def test_paused_engine_holds_requests_and_still_says_who_it_is(hf: Hf) -> None:
    await hf.post("/pause_generation", {"mode": "in_place"})
    call = asyncio.create_task(hf.generate(PROMPT))
    await hf.paused_with(waiting=1)
    assert (await hf.get("/model_info")).json()["weight_version"] == "default"
    assert (await hf.get("/ready")).status_code == 503
    assert (await hf.get("/health_generate")).status_code == 503
    assert not call.done()
    await hf.post("/continue_generation", {})
    assert len((await call)["output_ids"]) == 12
    assert (await hf.get("/ready")).status_code == 200
    assert (await hf.get("/health_generate")).status_code == 200


async def test_pause_by_abort_ends_what_runs_and_waits(hf: Hf) -> None:
    calls = await held(hf, request(PROMPT, max_new_tokens=50), steps=3)
    calls.append(asyncio.create_task(hf.post("/generate", request(PROMPT))))
    await hf.paused_with(running=1, waiting=1)
    await hf.post("/pause_generation")  # abort is the default
    ended = await replies(calls)
    assert [finish(reply) for reply in ended] == ["abort", "abort"]
    assert [len(reply["output_ids"]) for reply in ended] == [4, 0]
    assert "expected abort" in (await hf.post("/pause_generation", {"mode": "x"})).text


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_in_the_middle_changes_no_token(
    hf: Hf, references: list[Reference], mode: str
) -> None:
    whole, _ = outcome(await hf.generate(PROMPT, max_new_tokens=20))
    await hf.post("/flush_cache")
    before = (await hf.state())["counts"]["prefill_tokens"]
    (call,) = await held(hf, request(PROMPT, max_new_tokens=20), steps=5)
    await hf.post("/pause_generation", {"mode": mode})
    await hf.paused_with(**({"running": 1} if mode == "in_place" else {"waiting": 1}))
    await hf.post("/continue_generation")
    output, log_probs = outcome((await replies([call]))[0])
    assert output == whole
    assert log_probs == pytest.approx(references[0].log_probs(PROMPT, output), abs=NOISE)
    fed = (await hf.state())["counts"]["prefill_tokens"] - before
    # Retracted: the prompt and the six tokens so far were fed in once more.
    assert fed == len(PROMPT) + (0 if mode == "in_place" else len(PROMPT) + 6)


# -- weights


async def test_new_weights_in_the_middle_lose_nothing_and_spans_say_whose_token_is_whose(
    hf: Hf, folders: list[Path], references: list[Reference]
) -> None:
    calls = await held(
        hf,
        *(request(PROMPT, max_new_tokens=20, sampling_seed=i, temperature=0.7) for i in range(3)),
        steps=6,
    )
    body = {"model_path": str(folders[1]), "weight_version": "7"}
    updated = (await hf.post("/update_weights_from_disk", body)).json()
    assert (updated["success"], updated["num_paused_requests"]) == (True, 3)
    info = (await hf.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("7", str(folders[1]))
    await hf.post("/continue_generation")
    for reply in await replies(calls):
        output, log_probs = outcome(reply)
        assert len(output) == 20
        assert reply["meta_info"]["weight_versions"] == [
            {"version": "default", "start": 0, "end": 7},
            {"version": "7", "start": 7, "end": 20},
        ]
        old, new = (ref.log_probs(PROMPT, output, 0.7) for ref in references)
        assert log_probs[:7] == pytest.approx(old[:7], abs=NOISE)
        # All KV was computed again: what comes now is of the new weights alone.
        assert log_probs[7:] == pytest.approx(new[7:], abs=NOISE)
        assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1


async def test_new_weights_that_keep_the_cache_sample_on_from_the_old_keys(
    hf: Hf, folders: list[Path], references: list[Reference]
) -> None:
    (call,) = await held(hf, request(PROMPT, max_new_tokens=20), steps=6)
    body = {"model_path": str(folders[1]), "weight_version": "7", "flush_cache": False}
    await hf.post("/update_weights_from_disk", body)
    await hf.post("/continue_generation")
    reply = (await replies([call]))[0]
    output, log_probs = outcome(reply)
    assert [span["end"] for span in reply["meta_info"]["weight_versions"]] == [7, 20]
    new = references[1].log_probs(PROMPT, output)
    assert max(abs(a - b) for a, b in zip(log_probs[7:], new[7:], strict=True)) > 1e-3
    # Nobody else may go on from such keys.
    after = await hf.generate([*PROMPT, *output])
    assert after["meta_info"]["cached_tokens"] == 0


async def test_no_kv_of_old_weights_is_reused(hf: Hf, folders: list[Path]) -> None:
    first = await hf.generate(PROMPT)
    longer = [*PROMPT, *first["output_ids"], 10]
    assert (await hf.generate(longer))["meta_info"]["cached_tokens"] > 0
    await hf.post("/update_weights_from_disk", {"model_path": str(folders[1])})
    reply = await hf.generate(longer)
    assert reply["meta_info"]["cached_tokens"] == 0
    assert reply["meta_info"]["weight_version"] == "default"  # no label was given


async def test_folder_that_does_not_fit_is_refused_and_the_old_weights_go_on(
    hf: Hf, folders: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", hidden_size=32)
    turned = write_model(
        tmp_path / "turned", 1, rope_parameters={"rope_type": "default", "rope_theta": 77.0}
    )
    broken = write_model(tmp_path / "broken", 1)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    cases = {
        "/nowhere": "is not a folder",
        str(other): "config.json says hidden_size 32, the model has 64",
        str(turned): "config.json says rope_theta 77.0",
        str(broken): "cannot be",
    }
    for path, message in cases.items():
        response = await hf.post(
            "/update_weights_from_disk", {"model_path": path, "weight_version": "9"}
        )
        assert response.status_code == 400
        assert response.json()["success"] is False
        assert message in response.json()["message"]
    reply = await hf.generate(PROMPT)
    assert reply["meta_info"]["weight_version"] == "default"
    output, log_probs = outcome(reply)
    assert log_probs == pytest.approx(references[0].log_probs(PROMPT, output), abs=NOISE)


async def test_version_alone_is_changed_between_two_tokens_and_aborts_unless_told_not_to(
    hf: Hf,
) -> None:
    (call,) = await held(hf, request(PROMPT, max_new_tokens=9), steps=2)
    body = {"new_version": 4, "abort_all_requests": False}
    answered = (await hf.post("/update_weight_version", body)).json()
    assert (answered["success"], answered["new_version"]) == (True, "4")
    await hf.post("/continue_generation")
    (reply,) = await replies([call])
    assert reply["meta_info"]["weight_version"] == "4"
    assert reply["meta_info"]["weight_versions"] == [
        {"version": "default", "start": 0, "end": 3},
        {"version": "4", "start": 3, "end": 9},
    ]
    (call,) = await held(hf, request(PROMPT, max_new_tokens=9), steps=2)
    await hf.post("/update_weight_version", {"new_version": "5"})
    (reply,) = await replies([call])
    assert finish(reply) == "abort"
    assert reply["meta_info"]["weight_versions"] == [{"version": "4", "start": 0, "end": 3}]
    assert (await hf.post("/update_weight_version", {})).status_code == 400


async def test_cache_is_flushed_only_while_nobody_runs(hf: Hf) -> None:
    (call,) = await held(hf, request(PROMPT), steps=2)
    assert (await hf.post("/flush_cache")).status_code == 400
    await hf.post("/continue_generation")
    await call
    assert (await hf.state())["prefix_entries"] > 0
    assert (await hf.post("/flush_cache")).status_code == 200
    assert (await hf.state())["prefix_entries"] == 0


# -- faults


async def test_nan_ends_its_own_request_only_and_poisons_no_later_one(
    hf: Hf, references: list[Reference]
) -> None:
    poisoned = 999
    with torch.no_grad():
        hf.model._net.get_input_embeddings().weight[poisoned] = torch.nan
    long = [5] * 60
    calls = await held(hf, request(long, max_new_tokens=40), steps=1)
    bad = [5] * 20 + [poisoned] + [6] * 20
    calls.append(asyncio.create_task(hf.post("/generate", request(bad))))
    await hf.paused_with(running=1, waiting=1)
    hf.pause_after(1)
    await hf.post("/continue_generation")
    await hf.paused_with(running=1)
    # This one gets the row of the poisoned one, beside a longer one that still runs.
    calls.append(asyncio.create_task(hf.post("/generate", request(PROMPT))))
    await hf.paused_with(running=1, waiting=1)
    await hf.post("/continue_generation")
    good, nan, late = await replies(calls)
    assert nan["meta_info"]["finish_reason"] == {"type": "stop", "matched": "NaN happened"}
    assert nan["output_ids"] == []
    for ids, reply in ((long, good), (PROMPT, late)):
        output, log_probs = outcome(reply)
        assert log_probs == pytest.approx(references[0].log_probs(ids, output), abs=NOISE)
    again = await hf.generate(bad)
    assert again["meta_info"]["cached_tokens"] == 20, "KV of the poisoned request was kept"
    pool = EnginePool([hf.url], max_token_id=VOCABULARY - 1, policy=RetryPolicy(max_retries=0))
    try:
        with pytest.raises(EngineFault) as caught:
            await answer(pool, [5, 6, poisoned])
        assert caught.value.detail == Detail.NAN
    finally:
        await pool.aclose()


async def test_running_out_of_memory_is_the_longest_requests_error(
    hf: Hf, references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = hf.model.kv.decode

    def small(places: Sequence[Any], ids: Sequence[int]) -> Any:
        logits = decode(places, ids)
        if max(place.length for place in places) > 41:  # half of the work is done
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return logits

    monkeypatch.setattr(hf.model.kv, "decode", small)
    calls = await held(
        hf,
        request(PROMPT, max_new_tokens=20),
        request([5] * 34, max_new_tokens=20),
        steps=1,
    )
    await hf.post("/continue_generation")
    fine, failed = await asyncio.gather(*calls)
    assert failed.status_code == 500
    assert "out of memory with 42 tokens" in failed.json()["error"]["message"]
    output, log_probs = outcome(fine.json())
    assert len(output) == 20
    assert log_probs == pytest.approx(references[0].log_probs(PROMPT, output), abs=NOISE)
    assert (await hf.generate(PROMPT))["output_ids"]


async def test_memory_is_taken_from_the_prefix_cache_before_it_is_from_a_request(
    hf: Hf, references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    await hf.generate([*PROMPT, 5])
    assert (await hf.state())["prefix_entries"] == 1
    calls = 0

    def short(logits: Any, rows: Any, mode: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError
        return draw(logits, rows, mode)

    monkeypatch.setattr("worker.engines.hf.engine.draw", short)
    output, log_probs = outcome(await hf.generate(PROMPT))
    assert len(output) == 12
    assert log_probs == pytest.approx(references[0].log_probs(PROMPT, output), abs=NOISE)
    counts = (await hf.state())["counts"]
    assert (counts["out_of_memory"], counts.get("failed", 0)) == (1, 0)


@pytest.mark.parametrize("broken_at", [1, 2])
async def test_scoring_that_runs_out_of_memory_is_done_again_without_a_gap(
    hf: Hf, references: list[Reference], monkeypatch: pytest.MonkeyPatch, broken_at: int
) -> None:
    await hf.generate([7, 8])
    calls = 0

    def short(logits: Any, targets: Sequence[int]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == broken_at:
            raise MemoryError
        return scores(logits, targets)

    monkeypatch.setattr("worker.engines.hf.engine.scores", short)
    monkeypatch.setattr("worker.engines.hf.engine._SCORED_LOGITS", 8 * VOCABULARY)
    ids = list(range(40, 70))
    reply = await hf.generate(ids, max_new_tokens=0, logprob_start_len=2)
    scored = reply["meta_info"]["input_token_logprobs"]
    expected = references[0].log_probs(ids[:3], ids[3:])
    assert [entry[0] for entry in scored[1:]] == pytest.approx(expected, abs=NOISE)


async def test_prompt_whose_log_probs_are_nan_is_not_scored_with_nulls(hf: Hf) -> None:
    with torch.no_grad():
        hf.model._net.get_input_embeddings().weight[999] = torch.nan
    reply = await hf.generate([5, 999, 6, 7], max_new_tokens=0, logprob_start_len=0)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "NaN happened"}


async def test_body_beyond_the_limit_is_refused(hf: Hf) -> None:
    response = await hf.post("/generate", None, content=b" " * ((64 << 20) + 1))
    assert response.status_code == 413
    assert "/generate" in response.json()["error"]["message"]


async def test_forward_pass_that_breaks_is_its_requests_error_and_the_engine_goes_on(
    hf: Hf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prefill = hf.model.kv.prefill

    def breaking(place: Any, ids: Sequence[int], keep: int) -> Any:
        if 666 in ids:
            raise RuntimeError("no kernel for this")
        return prefill(place, ids, keep)

    monkeypatch.setattr(hf.model.kv, "prefill", breaking)
    broken = await hf.post("/generate", request([5, 666]))
    assert broken.status_code == 500
    assert "no kernel for this" in broken.json()["error"]["message"]
    assert len((await hf.generate(PROMPT))["output_ids"]) == 12
    assert "no kernel for this" in capfd.readouterr().err


async def test_bug_of_the_engine_itself_hangs_nobody(
    hf: Hf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def bug(tasks: Any, logits: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(hf.batch, "_sample", bug)
    response = await hf.post("/generate", request(PROMPT))
    assert (response.status_code, "a bug" in response.text) == (500, True)
    monkeypatch.undo()
    assert len((await hf.generate(PROMPT))["output_ids"]) == 12
    assert (await hf.get("/health")).status_code == 200
    assert "a bug" in capfd.readouterr().err


async def test_rid_in_use_is_refused_and_free_again_afterwards(hf: Hf) -> None:
    (call,) = await held(hf, request(PROMPT, rid="r"), steps=1)
    assert "Duplicate request ID" in await hf.refused(PROMPT, rid="r")
    await hf.post("/continue_generation")
    await call
    assert (await hf.generate(PROMPT, rid="r"))["meta_info"]["id"] == "r"


# -- our client


async def test_our_client_takes_an_abort_with_its_tokens_and_the_versions_of_an_update(
    hf: Hf, folders: list[Path]
) -> None:
    pool = EnginePool([hf.url], max_token_id=VOCABULARY - 1, policy=RetryPolicy(max_retries=0))
    try:
        await hf.post("/pause_generation", {"mode": "in_place"})
        call = asyncio.create_task(answer(pool, max_new_tokens=40))
        await hf.paused_with(waiting=1)
        hf.pause_after(3)
        await hf.post("/continue_generation")
        await hf.paused_with(running=1)
        body = {"model_path": str(folders[1]), "weight_version": 3}
        await hf.post("/update_weights_from_disk", body)
        hf.pause_after(2)
        await hf.post("/continue_generation")
        await hf.paused_with(running=1)
        await hf.post("/abort_request", {"abort_all": True})
        got = await call
        assert got.finish is Finish.ABORT
        assert got.versions == [(0, 0, 4), (3, 4, 7)]
        assert len(got.log_probs) == 7
    finally:
        await pool.aclose()


# -- the process


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "worker.engines.hf", "--model", str(folder), *arguments]


@pytest.mark.slow
async def test_process_says_where_it_listens_and_answers_what_it_has_at_sigterm(
    folders: list[Path], tmp_path: Path
) -> None:
    arguments = command(folders[0], "--port", "0", "--threads", "1", "--device", "cpu")
    child = Child("hf", arguments, folder=tmp_path, environment={"PATH": "/usr/bin"}, cwd=ROOT)
    child.start()
    try:
        line = await asyncio.to_thread(wait_until, lambda: _line(child))
        hf = Hf(line.removeprefix("listening on "), None, None)  # type: ignore[arg-type]
        assert len((await hf.generate(PROMPT))["output_ids"]) == 12
        await hf.post("/pause_generation", {"mode": "in_place"})
        call = asyncio.create_task(hf.post("/generate", request(PROMPT)))

        async def waits() -> bool:
            return bool((await hf.state())["waiting"])

        async with asyncio.timeout(30):
            while not await waits():
                await asyncio.sleep(0.01)
        assert child.process is not None
        child.process.send_signal(signal.SIGTERM)
        reply = (await call).json()
        assert reply["meta_info"]["finish_reason"]["message"] == "The engine is stopping"
        assert await asyncio.to_thread(child.process.wait, 40) == 0
        assert child.log.read_text().splitlines() == [line]
    finally:
        child.kill()


def _line(child: Child) -> str:
    assert child.running, child.tail()
    lines = child.log.read_text().splitlines()
    return lines[0] if lines else ""


def test_what_is_wrong_at_the_start_is_one_sentence_and_exit_code_2(
    folders: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from worker.engines.hf import __main__ as program

    bare, odd = tmp_path / "bare", tmp_path / "odd"
    for folder in (bare, odd):
        folder.mkdir()
        (folder / "config.json").write_text((folders[0] / "config.json").read_text())
    (odd / "model.safetensors").write_bytes(b"\0" * 16)
    half = tmp_path / "half"
    shutil.copytree(folders[0], half)
    (half / "tokenizer.json").write_text("{}")
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    free = ("--port", "0", "--device", "cpu")
    cases: list[tuple[tuple[str, ...], str]] = [
        ((str(tmp_path / "none"), *free), "is not a folder"),
        ((str(tmp_path), *free), "has no config.json"),
        ((str(bare), *free), "has no *.safetensors"),
        ((str(odd), *free), "cannot be loaded"),
        ((str(half), *free), "tokenizer.json"),
        ((str(folders[0]), *free, "--max-batch", "0"), "--max-batch must be at least 1"),
        ((str(folders[0]), *free, "--context-tokens", "257"), "exceeds the model's 256"),
        ((str(folders[0]), "--device", "abacus", "--port", "0"), "--device abacus"),
        ((str(folders[0]), "--port", port), "in use"),
    ]
    for arguments, message in cases:
        assert program.main(["--model", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith("hf engine: "), len(err.splitlines())) == ("", True, 1), err
        assert message in err
    taken.close()
    monkeypatch.setattr(program, "NEEDED", ("torch_of_no_kind",))
    assert program.main(["--model", str(folders[0]), *free]) == 2
    assert "torch_of_no_kind missing; install rollstream[hf" in capsys.readouterr().err
    program_line = command(tmp_path / "none")
    done = subprocess.run(program_line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "is not a folder" in done.stderr) == (2, True)
