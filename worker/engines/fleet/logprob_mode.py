"""Finds out of which distribution an engine's log-probs are, by asking it a few tokens.

Owns the questions and what their answers mean. Never decides whether an engine is used. Invariant:
`raw` and `scaled` are only ever said of log-probs that were seen; anything else is undecided.

A token that is sampled at T = 0.7 and at T = 1.4 after the same prompt has one log-prob where the
engine reports log softmax(logits), whatever T it samples at, and two different ones elsewhere. Only
two tokens may follow each prompt (`top_k` = 2), so that the same one comes up at both temperatures
(top_k = 1 would not do: SGLang reports raw log-probs of an all-greedy batch). A log-prob near 0
says nothing, since it is near 0 at every temperature.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, MutableMapping
from enum import StrEnum

from rollstream.errors import EngineFault, Withheld
from rollstream.sample import UNKNOWN_VERSION

from ...sampling import Sampling
from ...types import Finish, RequestIds
from ..client import EngineClient
from ..protocol.request import new_rid

COLD, WARM = 0.7, 1.4
_SEEDS = (1, 2, 3)
_TELLING = -0.05
"""A log-prob above it is too near to 0 to tell anything."""
_NOISE = 0.03
"""Two forward passes of one prompt differ by less (bfloat16, other batches)."""
ROUTING_KEY = "logprob-mode"


class Mode(StrEnum):
    """What log-probs of an engine are."""

    RAW = "raw"
    SCALED = "scaled"
    UNDECIDED = "undecided"


def prompts(max_token_id: int) -> list[list[int]]:
    """Return short prompts of a vocabulary, from one that repeats to one that does not.

    Plain low ids, which every vocabulary has; what they spell does not matter. A model is sure of
    the next token of the first, and less and less of the others'.
    """
    num_ids = max_token_id + 1
    return [[(320 + 17 * (i % period)) % num_ids for i in range(9)] for period in (2, 3, 5, 9)]


async def find_mode(
    client: EngineClient,
    max_token_id: int,
    *,
    timeout_s: float,
    flights: MutableMapping[str, asyncio.Timeout],
) -> Mode:
    """Ask an engine one token after each prompt at two temperatures; bounded.

    Args:
        client: of the engine.
        max_token_id: the highest id of the vocabulary.
        timeout_s: of each question; all are asked at once.
        flights: gets every question by its rid while it is at the engine. Who aborts one gives its
            timeout a time: until then its reply is awaited.

    Raises:
        EngineFault: it answered none of the questions.
        Withheld: a question was aborted, so the answers say nothing.
    """
    questions = [
        (number, prompt, temperature, seed)
        for number, prompt in enumerate(prompts(max_token_id))
        for temperature in (COLD, WARM)
        for seed in _SEEDS
    ]
    answers = await asyncio.gather(
        *(_ask(client, prompt, t, seed, timeout_s, flights) for _, prompt, t, seed in questions)
    )
    if any(isinstance(answer, Withheld) for answer in answers):
        raise Withheld(f"{client.url}: the questions about its log-probs were aborted")
    seen: dict[tuple[int, int], dict[float, float]] = {}
    for (number, _, temperature, _), answer in zip(questions, answers, strict=True):
        if isinstance(answer, tuple):
            token, log_prob = answer
            seen.setdefault((number, token), {})[temperature] = log_prob
    faults = [answer for answer in answers if isinstance(answer, EngineFault)]
    if len(faults) == len(answers):
        raise faults[0]
    both = [at for at in seen.values() if len(at) == 2]
    return mode_of((at[COLD], at[WARM]) for at in both)


async def _ask(
    client: EngineClient,
    prompt: list[int],
    temperature: float,
    seed: int,
    timeout_s: float,
    flights: MutableMapping[str, asyncio.Timeout],
) -> tuple[int, float] | EngineFault | Withheld | None:
    """Return the token and its log-prob; faults are values here, and an empty reply is None."""
    pieces, rid = [",".join(map(str, prompt)).encode()], new_rid()
    flight = asyncio.timeout(None)
    try:
        async with flight:
            flights[rid] = flight
            completion = await client.generate(
                RequestIds(pieces, len(prompt)),
                Sampling(temperature=temperature, max_new_tokens=1, top_k=2, seed=seed),
                rid=rid,
                routing_key=ROUTING_KEY,
                version=0,
                timeout_s=timeout_s,
                salt=UNKNOWN_VERSION,
            )
    except TimeoutError:
        return Withheld("it did not answer an abort in time")
    except EngineFault as error:
        return error if flight.when() is None else Withheld(error.message)
    finally:
        flights.pop(rid, None)
    if completion.finish is Finish.ABORT:
        return Withheld("it was aborted")
    if len(completion.ids) != 1:
        return None
    return int(completion.ids[0]), float(completion.log_probs[0])


def mode_of(pairs: Iterable[tuple[float, float]]) -> Mode:
    """Return what pairs of log-probs of one token at both temperatures say.

    One that differs does not outvote ten that are equal: half must differ, or none.
    """
    telling = [(cold, warm) for cold, warm in pairs if min(cold, warm) < _TELLING]
    num_different = sum(abs(cold - warm) > _NOISE for cold, warm in telling)
    if not telling:
        return Mode.UNDECIDED
    if num_different == 0:
        return Mode.RAW
    return Mode.SCALED if 2 * num_different >= len(telling) else Mode.UNDECIDED


def raw_text(url: str) -> str:
    """Return what to do about an engine whose log-probs are raw where they must not be."""
    return (
        f"{url} reports raw log-probs, log softmax(logits), but this run samples at a temperature "
        "other than 1, so they are not those of what is sampled: start it with --logprobs-mode "
        "processed_logprobs (vLLM), or set sampling.temperature to 1"
    )
