"""The hf engine's tokens and log-probs, against plain transformers, over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hf import (
    CONTEXT,
    EOS,
    NOISE,
    VOCABULARY,
    Hf,
    Reference,
    need_torch,
    outcome,
    request,
    running,
    write_model,
)

need_torch()

import torch  # noqa: E402 - only where it is there

from rollstream.errors import ConfigError  # noqa: E402
from worker.engines.fleet.pool import EnginePool, RetryPolicy  # noqa: E402
from worker.engines.hf.params import Params  # noqa: E402
from worker.engines.hf.sampler import LogprobMode, Row, draw, uniform  # noqa: E402
from worker.sampling import Sampling  # noqa: E402
from worker.types import Finish, RequestIds  # noqa: E402

PROMPT = [1, 21, 10, 1104, 1105, 2, 10, 1, 22, 10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hf(folder: Path) -> Iterator[Hf]:
    with running(folder, "--max-batch", "8", "--prefix-cache-mb", "0") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 70))] for _ in range(num)]


def biased(*ids: int, step: float = 1.0) -> dict[str, float]:
    return {str(token): 100.0 - step * place for place, token in enumerate(ids)}


# -- what the log-probs are


async def test_log_probs_of_a_full_batch_are_those_of_a_plain_forward_pass(
    hf: Hf, reference: Reference
) -> None:
    asked = prompts(20)
    replies = await asyncio.gather(
        *(
            hf.generate(ids, sampling_seed=i, max_new_tokens=4 + 3 * i, temperature=0.5 + i / 20)
            for i, ids in enumerate(asked)
        )
    )
    for i, (ids, reply) in enumerate(zip(asked, replies, strict=True)):
        output, log_probs = outcome(reply)
        assert len(output) == 4 + 3 * i
        assert log_probs == pytest.approx(reference.log_probs(ids, output, 0.5 + i / 20), abs=NOISE)
    assert (await hf.state())["counts"]["largest_batch"] == 8


async def test_request_alone_gives_the_tokens_that_it_gives_in_a_batch(
    hf: Hf, reference: Reference
) -> None:
    asked = prompts(8, seed=5)
    together = await asyncio.gather(
        *(hf.generate(ids, sampling_seed=i, max_new_tokens=25) for i, ids in enumerate(asked))
    )
    for i, ids in enumerate(asked):
        alone, alone_log_probs = outcome(await hf.generate(ids, sampling_seed=i, max_new_tokens=25))
        output, log_probs = outcome(together[i])
        same = agree(reference, ids, i, alone, output)
        assert alone_log_probs[:same] == pytest.approx(log_probs[:same], abs=NOISE)


def agree(ref: Reference, prompt: list[int], seed: int, one: list[int], other: list[int]) -> int:
    """Return how many tokens two runs share; where they part, the draw was within float noise."""
    same = next((k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    if same < len(one):
        position = len(prompt) + same
        probs = torch.softmax(ref.logits([*prompt, *one[:same]])[-1], -1).double().cumsum(0)
        off = float((probs[:-1] - uniform(seed, position)).abs().min())
        assert off < 1e-5, f"token {same} differs, and no boundary is near"
    return same


async def test_seed_and_prompt_decide_the_tokens_and_a_resumed_request_continues_them(
    hf: Hf,
) -> None:
    whole, _ = outcome(await hf.generate(PROMPT, sampling_seed=7, max_new_tokens=20))
    again, _ = outcome(await hf.generate(PROMPT, sampling_seed=7, max_new_tokens=20))
    other, _ = outcome(await hf.generate(PROMPT, sampling_seed=8, max_new_tokens=20))
    rest, _ = outcome(await hf.generate([*PROMPT, *whole[:9]], sampling_seed=7, max_new_tokens=11))
    assert again == whole
    assert other != whole
    assert whole[:9] + rest == whole


@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_log_probs_are_of_the_distribution_that_the_mode_names(
    folder: Path, reference: Reference, mode: str
) -> None:
    with running(folder, "--logprob-mode", mode) as hf:
        reply = await hf.generate(PROMPT, temperature=0.6, top_k=5, sampling_seed=3)
        assert (await hf.get("/model_info")).json()["logprob_mode"] == mode
        pushed = await hf.generate(PROMPT, logit_bias=biased(31), temperature=0.6)
    output, log_probs = outcome(reply)
    rows = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 : -1]
    if mode == "raw":
        expected = reference.log_probs(PROMPT, output)
        # Neither a bias nor a temperature is seen in them.
        assert outcome(pushed)[1] == pytest.approx(
            reference.log_probs(PROMPT, [31] * 12), abs=NOISE
        )
    else:
        kept = torch.full_like(rows, -torch.inf)
        best = rows.topk(5, dim=-1)
        kept.scatter_(1, best.indices, best.values / 0.6)
        table = torch.log_softmax(kept, dim=-1)
        expected = [float(table[i, token]) for i, token in enumerate(output)]
    assert log_probs == pytest.approx(expected, abs=NOISE)


async def test_truncation_and_penalties_change_log_probs_as_in_sglang(
    hf: Hf, reference: Reference
) -> None:
    words = {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    reply = await hf.generate(
        PROMPT, top_k=3, repetition_penalty=1.5, logit_bias=biased(31, 32, 33), **words
    )
    output, log_probs = outcome(reply)
    rows = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 : -1].clone()
    counts: Counter[int] = Counter()
    for i, token in enumerate(output):
        for held, times in counts.items():
            value = rows[i, held] - 0.5 * times - 0.25
            rows[i, held] = value * 1.5 if value < 0 else value / 1.5
        for rank, held in enumerate((31, 32, 33)):
            rows[i, held] += 100.0 - rank
        counts[token] += 1
    table = torch.log_softmax(rows / 0.7, dim=-1)
    # Biases of 100 leave float32 less room.
    expected = [float(table[i, token]) for i, token in enumerate(output)]
    assert log_probs == pytest.approx(expected, abs=2e-4)
    assert max(counts.values()) > 1, "no token came twice: the penalties were not seen"


def test_draws_follow_the_distribution_in_every_mode_of_truncation() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    plain = torch.softmax(logits[0] / 0.8, -1)
    cases: list[tuple[Params, list[int]]] = [
        (Params(temperature=0.8), [0, 1, 2, 3, 4, 5]),
        (Params(temperature=0.8, top_k=2), [0, 1]),
        (Params(temperature=0.8, top_p=float(plain[:2].sum()) + 0.01), [0, 1, 2]),
        (Params(temperature=0.8, min_p=float(plain[3] / plain[0]) * 0.99), [0, 1, 2, 3]),
        (Params(temperature=0.8, top_k=1), [0]),
    ]
    for params, kept in cases:
        num = 4000
        rows = [Row(params, 1, i, Counter(), frozenset()) for i in range(num)]
        draws = draw(logits.expand(num, -1), rows, LogprobMode.PROCESSED)
        shares = Counter(drawn.token for drawn in draws)
        expected = plain[kept] / plain[kept].sum()
        assert sorted(t for t in shares if t is not None) == kept
        for token, share in zip(kept, expected.tolist(), strict=True):
            spread = (share * (1 - share) / num) ** 0.5
            assert abs(shares[token] / num - share) <= 4.5 * spread + 1e-9
        for drawn in draws[:20]:
            assert drawn.token is not None
            share = float(expected[kept.index(drawn.token)])
            assert drawn.log_prob == pytest.approx(np.log(share), abs=1e-5)


@pytest.mark.parametrize("size", [5, 1024, 1025, 2500])
def test_draw_is_where_the_whole_cumulative_distribution_passes_the_uniform_number(
    size: int,
) -> None:
    torch.manual_seed(size)
    logits = torch.randn(300, size) * 3
    logits[:, torch.randperm(size)[: size // 2]] = -torch.inf
    rows = [Row(Params(), 9, i, Counter(), frozenset()) for i in range(300)]
    draws = draw(logits, rows, LogprobMode.TEMPERATURE)
    whole = torch.softmax(logits.double(), -1).cumsum(-1)
    for i, drawn in enumerate(draws):
        assert drawn.token is not None
        number = uniform(9, i)
        high = float(whole[i, drawn.token])
        low = float(whole[i, drawn.token - 1]) if drawn.token else 0.0
        assert low - 1e-6 <= number <= high + 1e-6
        assert high > low
        alone = draw(logits[i : i + 1], [rows[i]], LogprobMode.TEMPERATURE)
        assert alone[0].token == drawn.token


async def test_temperature_0_takes_the_likeliest_and_reports_the_log_probs_of_temperature_1(
    hf: Hf, reference: Reference
) -> None:
    output, log_probs = outcome(await hf.generate(PROMPT, temperature=0.0))
    rows = reference.logits([*PROMPT, *output])[len(PROMPT) - 1 : -1]
    assert output == rows.argmax(-1).tolist()
    assert log_probs == pytest.approx(reference.log_probs(PROMPT, output), abs=NOISE)


# -- where a reply ends


async def test_reply_ends_at_the_models_own_end_or_at_a_stop_token_and_keeps_it(hf: Hf) -> None:
    reply = await hf.generate(PROMPT, logit_bias=biased(EOS), ignore_eos=False)
    assert reply["output_ids"] == [EOS]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert reply["text"] == ""
    reply = await hf.generate(
        PROMPT, logit_bias=biased(30), ignore_eos=False, stop_token_ids=[30], no_stop_trim=True
    )
    assert (reply["output_ids"], reply["text"]) == ([30], "hello")
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 30}
    reply = await hf.generate(PROMPT, logit_bias=biased(30), stop_token_ids=[30])  # ignore_eos
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


async def test_special_tokens_are_text_unless_they_are_skipped(hf: Hf) -> None:
    fields: dict[str, Any] = {"logit_bias": biased(6), "max_new_tokens": 2}
    assert (await hf.generate(PROMPT, **fields))["text"] == ""
    shown = await hf.generate(PROMPT, skip_special_tokens=False, **fields)
    assert shown["text"] == "<tool_call><tool_call>"


async def test_stop_string_over_several_tokens_ends_the_reply_behind_its_last_token(
    hf: Hf,
) -> None:
    # Greedy with a penalty: "he" (31), then "llo" (32) once 31 was said.
    fields: dict[str, Any] = {
        "logit_bias": biased(31, 32, 33),
        "temperature": 0.0,
        "presence_penalty": 2.0,
        "max_new_tokens": 9,
    }
    free = await hf.generate(PROMPT, **fields)
    assert free["output_ids"][:3] == [31, 32, 33]
    for trim, text in ((False, "h"), (True, "hell")):
        reply = await hf.generate(PROMPT, stop=["zzz", "ell"], no_stop_trim=trim, **fields)
        assert reply["output_ids"] == [31, 32]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ell"}
        assert reply["text"] == text


async def test_end_may_not_come_before_min_new_tokens(hf: Hf) -> None:
    fields: dict[str, Any] = {
        "logit_bias": biased(EOS, 31, 30, step=10.0),
        "stop_token_ids": [31],
        "temperature": 0.0,
        "ignore_eos": False,
    }
    assert (await hf.generate(PROMPT, **fields))["output_ids"] == [EOS]
    reply = await hf.generate(PROMPT, min_new_tokens=3, **fields)
    assert reply["output_ids"] == [30, 30, 30, EOS]


async def test_length_is_cut_at_the_context_where_no_length_was_asked_for(hf: Hf) -> None:
    ids = [5] * (CONTEXT - 3)
    body = request(ids)
    body["sampling_params"] = {"ignore_eos": True}  # 128 by default
    reply = (await hf.post("/generate", body)).json()
    assert len(reply["output_ids"]) == 3
    reply = (await hf.post("/generate", body | {"input_ids": PROMPT})).json()
    assert len(reply["output_ids"]) == 128


# -- scoring a prompt


async def test_prompt_is_scored_from_one_behind_the_start_without_temperature(
    hf: Hf, reference: Reference
) -> None:
    ids = prompts(1, seed=9)[0][:40]
    for start in (0, 5, len(ids) - 1):
        reply = await hf.generate(ids, max_new_tokens=0, logprob_start_len=start, temperature=0.3)
        scored = reply["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in scored] == ids[start:]
        assert scored[0][0] is None
        expected = reference.log_probs(ids[: start + 1], ids[start + 1 :])
        assert [entry[0] for entry in scored[1:]] == pytest.approx(expected, abs=NOISE)
        assert reply["output_ids"] == []
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    reply = await hf.generate(ids, logprob_start_len=3, max_new_tokens=2)
    assert len(reply["meta_info"]["input_token_logprobs"]) == len(ids) - 3
    assert len(outcome(reply)[0]) == 2


async def test_scoring_in_pieces_gives_what_scoring_at_once_gives(
    hf: Hf, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompts(1, seed=11)[0][:33]
    once = await hf.generate(ids, max_new_tokens=0, logprob_start_len=2)
    monkeypatch.setattr("worker.engines.hf.engine._SCORED_LOGITS", 7 * VOCABULARY)
    pieces = await hf.generate(ids, max_new_tokens=0, logprob_start_len=2)
    a, b = (reply["meta_info"]["input_token_logprobs"] for reply in (once, pieces))
    assert [entry[1] for entry in a] == [entry[1] for entry in b]
    assert [entry[0] for entry in a[1:]] == pytest.approx([entry[0] for entry in b[1:]], abs=NOISE)


# -- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 4}, "unknown field `seed`, expected one of `max_new_tokens`"),
        ({"max_new_tokens": "9"}, "invalid type"),
        ({"max_new_tokens": True}, "invalid type"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"min_new_tokens": 13}, "min_new_tokens must be in"),
        ({"temperature": -0.1}, "temperature must be a non-negative"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_k": 0}, "top_k must be"),
        ({"min_p": 1.5}, "min_p must be in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in"),
        ({"sampling_seed": 1 << 63}, "sampling_seed must be in"),
        ({"logit_bias": {str(VOCABULARY): 1.0}}, "logit_bias"),
        ({"regex": "a+"}, "cannot honour regex"),
        ({"n": 2}, "cannot honour n"),
        ({"stream": True}, "cannot honour stream"),
        ({"top_logprobs_num": 3}, "cannot honour top_logprobs_num"),
        ({"lora_path": "x"}, "cannot honour lora_path"),
        ({"return_routed_experts": True}, "cannot honour return_routed_experts"),
        ({"text": "hi"}, "takes input_ids, not text"),
        ({"logprob_start_len": 99}, "logprob_start_len=99"),
        ({"max_new_tokens": CONTEXT}, "Requested token count exceeds the model's maximum context"),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_names_it(
    hf: Hf, fields: dict[str, Any], message: str
) -> None:
    assert message in await hf.refused(PROMPT, **fields)


async def test_null_asks_for_nothing_and_unknown_fields_of_the_body_are_ignored(hf: Hf) -> None:
    from worker.engines.hf.params import READERS
    from worker.engines.sim.protocol import _SAMPLING_KEYS

    assert set(READERS) == set(_SAMPLING_KEYS)
    body = request(PROMPT) | {"unheard_of": 1, "priority": 3, "routing_key": "g"}
    body["sampling_params"] = dict.fromkeys(READERS) | {"max_new_tokens": 1}
    assert (await hf.post("/generate", body)).status_code == 200


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([VOCABULARY], f"the id {VOCABULARY} outside"),
        ([-1], "the id -1 outside"),
        ([[1, 2]], "no list of integers"),
        ([1] * CONTEXT, f"is longer than the model's context length ({CONTEXT} tokens)"),
    ],
)
async def test_prompt_that_the_model_cannot_take_is_a_400(
    hf: Hf, ids: list[Any], message: str
) -> None:
    assert message in await hf.refused(ids)


async def test_bodies_that_are_no_request_are_refused(hf: Hf) -> None:
    for raw in (b"{", b"[]", b"\xff", b'{"input_ids": "abc"}', b"[" * 100_000):
        assert (await hf.post("/generate", content=raw, body=None)).status_code == 400
    assert (await hf.get("/nothing")).status_code == 404


# -- the prefix cache


async def test_next_turn_reuses_the_kv_of_the_last_and_says_so(
    folder: Path, reference: Reference
) -> None:
    with running(folder) as hf:
        first, _ = outcome(await hf.generate(PROMPT, extra_key="v0"))
        longer = [*PROMPT, *first, 10, 1, 21]
        cold = await hf.generate(longer, extra_key="v1")
        warm = await hf.generate(longer, extra_key="v0")
        scored = await hf.generate(longer, extra_key="v0", logprob_start_len=4, max_new_tokens=0)
    assert cold["meta_info"]["cached_tokens"] == 0
    # Everything but the last sampled token, which nobody ever fed in.
    assert warm["meta_info"]["cached_tokens"] == len(PROMPT) + len(first) - 1
    assert scored["meta_info"]["cached_tokens"] == 4
    for reply in (cold, warm):
        output, log_probs = outcome(reply)
        assert log_probs == pytest.approx(reference.log_probs(longer, output), abs=NOISE)


async def test_members_of_a_group_share_the_kv_of_their_prompt_while_they_run(
    folder: Path, reference: Reference
) -> None:
    ids = prompts(1, seed=3)[0][:30]
    with running(folder, "--prefix-cache-mb", "0") as hf:
        await hf.post("/pause_generation", {"mode": "in_place"})
        calls = [asyncio.create_task(hf.generate(ids, sampling_seed=i)) for i in range(4)]
        await hf.paused_with(waiting=4)
        await hf.post("/continue_generation")
        replies = await asyncio.gather(*calls)
    assert sorted(r["meta_info"]["cached_tokens"] for r in replies) == [0, 29, 29, 29]
    for reply in replies:
        output, log_probs = outcome(reply)
        assert log_probs == pytest.approx(reference.log_probs(ids, output), abs=NOISE)


# -- other models


LONE = {
    "Qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
"""A sliding window, and a recurrent state."""


@pytest.mark.parametrize("kind", LONE)
async def test_model_without_full_attention_runs_one_request_at_a_time_and_reuses_whole_turns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    write_model(tmp_path, kind=kind, **LONE[kind])
    reference = Reference(tmp_path)
    with running(tmp_path) as hf:
        assert "one request at a time" in capfd.readouterr().err
        asked = prompts(3, seed=4)
        replies = await asyncio.gather(*(hf.generate(ids) for ids in asked))
        longer = [*asked[0], *replies[0]["output_ids"], 10]
        replies.append(await hf.generate(longer))
        assert (await hf.state())["batched"] is False
    assert replies[-1]["meta_info"]["cached_tokens"] == len(longer) - 2
    for ids, reply in zip([*asked, longer], replies, strict=True):
        output, log_probs = outcome(reply)
        assert log_probs == pytest.approx(reference.log_probs(ids, output), abs=NOISE)


async def test_cache_that_gives_other_logits_than_the_model_is_not_used(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.engines.hf import kv
    from worker.engines.hf.model import Model

    def blind(self: Any, allowed: Any) -> Any:
        return torch.ones_like(allowed)

    monkeypatch.setattr(kv.SlotKv, "_mask", blind)
    with running(folder) as hf:
        assert (await hf.state())["batched"] is False
        output, log_probs = outcome(await hf.generate(PROMPT))
        assert log_probs == pytest.approx(reference.log_probs(PROMPT, output), abs=NOISE)
    prefill = kv.LoneKv.prefill

    def forgetful(self: Any, place: Any, ids: Any, keep: int) -> Any:
        if place.length:
            self.reset(place)
        return prefill(self, place, ids, keep)

    monkeypatch.setattr(kv.LoneKv, "prefill", forgetful)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM cannot be run with a cache"):
        Model(folder, device="cpu")


async def test_mixture_model_says_which_experts_every_token_took(tmp_path: Path) -> None:
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_model(tmp_path, kind="Qwen3Moe", decoder_sparse_step=1, mlp_only_layers=[], **mixture)
    reference = Reference(tmp_path)
    asked = prompts(3, seed=2)
    with running(tmp_path) as hf:
        replies = list(
            await asyncio.gather(*(hf.generate(ids, return_routed_experts=True) for ids in asked))
        )
        longer = [*asked[0], *replies[0]["output_ids"], 10, 11]
        start = len(longer) - 4
        replies.append(
            await hf.generate(longer, return_routed_experts=True, routed_experts_start_len=start)
        )
        await hf.post("/pause_generation", {"mode": "in_place"})
        call = asyncio.create_task(hf.generate(PROMPT, return_routed_experts=True))
        await hf.paused_with(waiting=1)
        hf.pause_after(4)
        await hf.post("/continue_generation")
        await hf.paused_with(running=1)
        await hf.post("/pause_generation", {"mode": "retract"})  # and fed in once more
        await hf.post("/continue_generation")
        replies.append(await call)
    assert replies[3]["meta_info"]["cached_tokens"] > 0
    sent = [*asked, longer, PROMPT]
    for ids, reply, first in zip(sent, replies, [0, 0, 0, start, 0], strict=True):
        output, log_probs = outcome(reply)
        assert log_probs == pytest.approx(reference.log_probs(ids, output), abs=NOISE)
        raw = base64.b64decode(reply["meta_info"]["routed_experts"])
        rows = np.frombuffer(raw, dtype="<i4").reshape(-1, 2, 2)
        net = reference.net
        with torch.no_grad():
            logits = net(torch.tensor([[*ids, *output]]), output_router_logits=True).router_logits
        expected = np.stack([layer.topk(2, dim=-1).indices.numpy() for layer in logits], axis=1)
        assert np.array_equal(rows, expected[first : len(ids) + len(output) - 1])


# -- our own client


async def test_our_client_reads_replies_of_this_engine(hf: Hf, reference: Reference) -> None:
    pool = EnginePool([hf.url], max_token_id=VOCABULARY - 1, policy=RetryPolicy(max_retries=0))
    try:
        for temperature in (1.0, 0.7):
            got = await pool.generate(
                RequestIds([",".join(map(str, PROMPT)).encode()], len(PROMPT)),
                Sampling(max_new_tokens=6, seed=5, temperature=temperature),
                routing_key="g",
                version=0,
            )
            assert got.finish in (Finish.LENGTH, Finish.STOP)
            assert got.versions == [(0, 0, len(got.ids))]
            assert got.cache is not None
            assert got.cache.total_prompt_tokens == len(PROMPT)
            expected = reference.log_probs(PROMPT, got.ids.tolist(), temperature)
            assert got.log_probs.tolist() == pytest.approx(expected, abs=NOISE)
    finally:
        await pool.aclose()
