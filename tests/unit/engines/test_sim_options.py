"""The command line of the simulated engine: every option reaches what it is of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from worker.engines.sim.__main__ import _again, build, parser
from worker.engines.sim.faults import Fault
from worker.engines.sim.server import LogProbsMode, Protocols


def test_every_fault_has_an_option_of_its_own(vocabulary: Path) -> None:
    share = 1 / (2 * len(Fault))
    options = [f"--fault-{fault.value.replace('_', '-')}={share}" for fault in Fault]
    engine = build(parser().parse_args([f"--tokenizer={vocabulary}", *options]))
    assert engine.core.faults.rates() == dict.fromkeys(Fault, share)


def test_no_fault_is_the_default(vocabulary: Path) -> None:
    engine = build(parser().parse_args([f"--tokenizer={vocabulary}"]))
    assert set(engine.core.faults.rates().values()) == {0.0}
    assert engine.core.versioned is False


@pytest.mark.parametrize("mode", ["processed", "processed_logprobs"])
def test_log_probs_mode_is_understood_in_our_words_and_in_vllms(mode: str) -> None:
    args = parser().parse_args(["--tokenizer=x", f"--logprobs-mode={mode}", "--protocol=vllm"])
    assert args.logprobs_mode is LogProbsMode.PROCESSED
    assert args.protocol is Protocols.VLLM


@pytest.mark.parametrize(
    "option", ["--logprobs-mode=warm", "--protocol=openai", "--replay-dtype=float"]
)
def test_word_that_is_none_is_refused_with_exit_code_2(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--tokenizer=x", option])
    assert ended.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err


def test_share_of_a_new_fault_beyond_one_is_refused_by_its_option(vocabulary: Path) -> None:
    args = parser().parse_args([f"--tokenizer={vocabulary}", "--fault-spans-gap=1.5"])
    with pytest.raises(ConfigError, match=r"--fault-spans-gap 1\.5: give 0 to 1"):
        build(args)


async def test_disturbances_come_again_and_again_and_not_at_all_by_default() -> None:
    enough = asyncio.Event()
    seen: list[int] = []

    def act() -> None:
        seen.append(1)
        if len(seen) == 3:
            enough.set()

    _again(0.001, act)
    _again(0.0, lambda: pytest.fail("never asked for"))
    async with asyncio.timeout(20):
        await enough.wait()
