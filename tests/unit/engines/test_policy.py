"""The scripted policy is a pure function, and its texts are what a rollout needs to meet."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rollstream.errors import ConfigError
from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.answers import load_answers
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import SUBMIT, PolicyConfig, solve_rate

ROOT = Path(__file__).parents[3]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
QUESTION = "Ann has 12 apples and buys 7 more. How many has she?"
ANSWERS = {QUESTION: "19"}


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), ANSWERS)


def ids_of(policy: Policy, text: str) -> list[int]:
    return policy.vocabulary.encode_reply(text).tolist()[:-1]


def a_chat(
    policy: Policy,
    *,
    tools: bool = True,
    question: str = QUESTION,
    after: str = "",
    listed: object = CALCULATOR,
) -> list[int]:
    """Return prompt ids in Qwen3's format."""
    system = ""
    if tools:
        system = (
            "<|im_start|>system\n# Tools\n\nSignatures are within <tools></tools> XML tags:\n"
            f"<tools>\n{json.dumps(listed)}\n</tools>\n\n"
            "Answer within <tool_call></tool_call>.<|im_end|>\n"
        )
    user = f"<|im_start|>user\n{question}<|im_end|>\n"
    return ids_of(policy, f"{system}{user}{after}<|im_start|>assistant\n")


def sampling(seed: int, max_new_tokens: int = 4096, **more: object) -> dict[str, object]:
    return {"seed": seed, "max_new_tokens": max_new_tokens, "temperature": 1.0, **more}


def test_policy_gives_float32_log_probs_below_zero_and_ids_of_the_vocabulary(
    policy: Policy,
) -> None:
    prompt = a_chat(policy)
    for seed in range(50):
        ids, log_probs = policy.expected(prompt, sampling(seed))
        assert ids.dtype == np.int32
        assert log_probs.dtype == np.float32
        assert len(ids) == len(log_probs) > 0
        assert np.isfinite(log_probs).all()
        assert (log_probs < 0).all()
        assert ids.min() >= 0
        assert ids.max() < policy.vocabulary.size
        assert ids[-1] == policy.vocabulary.im_end


def test_policy_differs_by_seed_and_by_prompt(policy: Policy) -> None:
    prompt, other = a_chat(policy), a_chat(policy, question=QUESTION + " ")
    replies = [policy.expected(prompt, sampling(seed)) for seed in range(50)]
    assert len({ids.tobytes() for ids, _ in replies}) > 40
    assert len({log_probs.tobytes() for _, log_probs in replies}) == 50
    first, second = (policy.expected(p, sampling(1)) for p in (prompt, other))
    assert first[1].tobytes() != second[1].tobytes()


def test_policy_resumed_anywhere_continues_the_same_text_with_the_same_log_probs(
    policy: Policy,
) -> None:
    prompt = a_chat(policy)
    for seed in range(5):
        ids, log_probs = policy.expected(prompt, sampling(seed))
        for cut in range(len(ids)):
            rest = policy.expected([*prompt, *ids[:cut].tolist()], sampling(seed))
            assert np.array_equal(rest[0], ids[cut:])
            assert np.array_equal(rest[1], log_probs[cut:])


def test_policy_resumes_behind_a_prefilled_empty_reasoning_block(policy: Policy) -> None:
    prompt = [*a_chat(policy), *ids_of(policy, "<think>\n\n</think>\n\n")]
    ids, log_probs = policy.expected(prompt, sampling(3))
    rest = policy.expected([*prompt, *ids[:9].tolist()], sampling(3))
    assert np.array_equal(rest[0], ids[9:])
    assert np.array_equal(rest[1], log_probs[9:])


def test_policy_answers_a_prefix_that_it_did_not_say_as_a_prompt_of_its_own(
    policy: Policy,
) -> None:
    prompt = [*a_chat(policy), *ids_of(policy, "Sure! Here is")]
    ids, _ = policy.expected(prompt, sampling(1))
    assert ids[-1] == policy.vocabulary.im_end
    assert not np.array_equal(ids, policy.expected(a_chat(policy), sampling(1))[0])


def test_policy_is_the_same_in_another_process(policy: Policy, vocabulary: Path) -> None:
    program = (
        "import sys, json, hashlib\n"
        "from worker.engines.sim.policy import Policy\n"
        "prompt, answers = json.load(sys.stdin)\n"
        f"policy = Policy.load({str(vocabulary)!r}, answers)\n"
        "digest = hashlib.sha256()\n"
        "for seed in range(20):\n"
        "    for a in policy.expected(prompt, {'seed': seed, 'max_new_tokens': 4096}):\n"
        "        digest.update(a.tobytes())\n"
        "print(digest.hexdigest())\n"
    )
    prompt = a_chat(policy)
    digest = hashlib.sha256()
    for seed in range(20):
        for array in policy.expected(prompt, sampling(seed)):
            digest.update(array.tobytes())
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([prompt, ANSWERS]),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.strip() == digest.hexdigest()


def test_policy_text_is_canonical_but_for_the_tokens_that_are_split_on_purpose(
    policy: Policy, vocabulary: Path
) -> None:
    whole = Policy(tokenizer_of(str(vocabulary)), ANSWERS, PolicyConfig(split_rate=0.0))
    prompt, num_split = a_chat(policy), 0
    for seed in range(50):
        split, canonical = (p.expected(prompt, sampling(seed))[0] for p in (policy, whole))
        text = policy.vocabulary.decode(split)
        assert text == policy.vocabulary.decode(canonical)
        assert canonical.tolist() == ids_of(policy, text)
        num_split += len(split) - len(canonical)
    assert num_split > 50


def test_policy_cuts_at_the_budget_at_stop_ids_and_at_stop_strings(policy: Policy) -> None:
    prompt = a_chat(policy)
    whole = policy.reply(prompt, sampling(4))
    assert (whole.finish, whole.matched) == ("stop", policy.vocabulary.im_end)
    cut = policy.reply(prompt, sampling(4, 7))
    assert (cut.finish, cut.matched, cut.ids.tolist()) == ("length", None, whole.ids[:7].tolist())
    fifth = int(whole.ids[5])
    stopped = policy.reply(prompt, sampling(4, stop_token_ids=[fifth]))
    assert (stopped.finish, stopped.matched, int(stopped.ids[-1])) == ("stop", fifth, fifth)
    assert whole.ids.tolist()[: len(stopped.ids)] == stopped.ids.tolist()
    text = policy.vocabulary.decode(whole.ids)
    stop = text[20:30]
    named = policy.reply(prompt, sampling(4, stop=[stop]))
    assert (named.finish, named.matched) == ("stop", stop)
    assert stop in policy.vocabulary.decode(named.ids)
    assert stop not in policy.vocabulary.decode(named.ids[:-1])


def texts(policy: Policy, prompt: list[int], num: int = 300) -> list[str]:
    return [policy.vocabulary.decode(policy.expected(prompt, sampling(s))[0]) for s in range(num)]


def test_policy_calls_the_listed_tool_and_only_where_one_is_listed(policy: Policy) -> None:
    calls = [text for text in texts(policy, a_chat(policy)) if "<tool_call>" in text]
    assert 120 < len(calls) < 240
    valid = 0
    for text in calls:
        block = text.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
        try:
            call = json.loads(block)
        except ValueError:
            continue
        valid += 1
        assert call["name"] == "calculator"
        assert set(call["arguments"]) == {"expression"}
    assert 0.9 < valid / len(calls) < 1.0  # some are malformed on purpose
    assert not any("<tool_call>" in text for text in texts(policy, a_chat(policy, tools=False)))


def test_policy_answers_after_a_tool_result_and_stops_calling_in_the_end(policy: Policy) -> None:
    result = (
        "<|im_start|>assistant\ncalling<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n19\n</tool_response><|im_end|>\n"
    )
    after_one = texts(policy, a_chat(policy, after=result), 200)
    assert 0 < sum("<tool_call>" in text for text in after_one) < 80
    after_four = texts(policy, a_chat(policy, after=result * 4), 50)
    assert not any("<tool_call>" in text for text in after_four)


def test_policy_works_in_a_shell_and_hands_its_answer_in(policy: Policy) -> None:
    result = "<|im_start|>user\n<tool_response>\n84\n</tool_response><|im_end|>\n"
    texts: dict[int, list[str]] = {}
    for results in (0, 1, 9):
        prompt = a_chat(policy, after=result * results, listed=BASH)
        texts[results] = [
            policy.vocabulary.decode(policy.expected(prompt, sampling(seed))[0])
            for seed in range(40)
        ]
    assert all('"name": "bash"' in text for text in texts[0])
    assert sum(f"{SUBMIT} && echo 19" in text for text in texts[1]) >= 5
    assert sum("tee -a notes.txt" in text for text in texts[1]) >= 1
    assert not any(SUBMIT in text for text in texts[0])
    # An agent that went on all the same is answered in words.
    assert not any("bash" in text for text in texts[9])


def test_policy_calls_a_tool_that_takes_python_with_a_program(policy: Policy) -> None:
    python = json.loads(json.dumps(CALCULATOR).replace("calculator", "python"))
    python["function"]["parameters"]["properties"] = {"code": {"type": "string"}}
    calls = [t for t in texts(policy, a_chat(policy, listed=python), 60) if "<tool_call>" in t]
    assert len(calls) > 10
    programs = [text for text in calls if '"name": "python", "arguments": {"code": "print(' in text]
    assert len(programs) > 0.9 * len(calls)


def test_policy_writes_a_program_as_it_is_and_wrong_ones_that_end_never_or_at_once(
    vocabulary: Path,
) -> None:
    program = "```python\nprint(int(input()) + 7)\n```"
    policy = Policy(tokenizer_of(str(vocabulary)), {QUESTION: program})
    said = texts(policy, a_chat(policy, tools=False), 100)
    assert not any("\\boxed" in text for text in said)
    assert all(text.removesuffix("<|im_end|>").endswith("\n```") for text in said)
    assert 5 < sum(program in text for text in said) < 95
    for wrong in ("while True", "SystemExit", "NotImplementedError"):
        assert any(wrong in text for text in said)


def test_policy_solves_some_problems_always_some_never_and_most_sometimes(
    vocabulary: Path,
) -> None:
    questions = [f"What is {i} + 1?" for i in range(100)]
    policy = Policy(
        tokenizer_of(str(vocabulary)), {q: str(int(q.split()[2]) + 1) for q in questions}
    )
    kinds = Counter[str]()
    for number, question in enumerate(questions):
        prompt = a_chat(policy, tools=False, question=question)
        right = sum(f"\\boxed{{{number + 1}}}" in text for text in texts(policy, prompt, 8))
        kinds["always" if right == 8 else "never" if right == 0 else "sometimes"] += 1
        rate = solve_rate(question, policy.config)
        assert right == 8 if rate == 1.0 else right == 0 if rate == 0.0 else True
    assert kinds["always"] > 4
    assert kinds["never"] > 4
    assert kinds["sometimes"] > 50


def test_policy_guesses_where_its_table_has_no_answer(policy: Policy) -> None:
    text = texts(policy, a_chat(policy, tools=False, question="Who knows?"), 1)[0]
    assert "\\boxed{" in text


def test_policy_takes_a_prompt_without_chat_format(policy: Policy) -> None:
    ids, log_probs = policy.expected([3838, 374, 220, 16, 10, 22, 30], sampling(1))
    assert len(ids) == len(log_probs) > 0


def test_policy_names_the_first_difference_of_a_delivered_call(policy: Policy) -> None:
    prompt = a_chat(policy)
    ids, log_probs = policy.expected(prompt, sampling(1))
    assert policy.mismatch(prompt, sampling(1), ids, log_probs) is None
    assert policy.mismatch(prompt, sampling(1), ids[:-3], log_probs[:-3]) is None
    wrong = ids.copy()
    wrong[4] += 1
    assert "id 4 is" in str(policy.mismatch(prompt, sampling(1), wrong, log_probs))
    nudged = log_probs.copy()
    nudged[2] = np.nextafter(nudged[2], np.float32(0))
    assert "log-prob 2 is" in str(policy.mismatch(prompt, sampling(1), ids, nudged))
    longer = np.append(ids, np.int32(1))
    assert "at most" in str(policy.mismatch(prompt, sampling(1), longer, log_probs))


def test_answers_are_read_from_jsonl_in_both_shapes_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": " 1+1? ", "label": "2"},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}],
            "label": 4,
        },
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "3+3?"}]}], "label": "6"},
        {"prompt": "no label"},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert load_answers(f"jsonl:{file}") == {"1+1?": "2", "2+2?": "4", "3+3?": "6"}
    file.write_text('{"q": "1+1?", "a": "2"}')
    assert load_answers(f"jsonl:{file}?prompt=q&label=a") == {"1+1?": "2"}
    assert load_answers("") == {}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("nonsense", "expected reasoning_gym"),
        ("jsonl:/no/such/file", "No such file"),
        ("reasoning_gym:no_such_set", "no_such_set"),
        ("reasoning_gym:gsm_symbolic?size=-1", "gsm_symbolic"),
    ],
)
def test_answers_that_cannot_be_read_are_refused_by_name(spec: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_answers(spec)


def test_answers_of_reasoning_gym_are_those_of_spec_and_seed() -> None:
    spec = "reasoning_gym:simple_equations?size=5&seed=3"
    assert load_answers(spec) == load_answers(spec)
    assert len(load_answers(spec)) == 5
    assert load_answers(spec) != load_answers("reasoning_gym:simple_equations?size=5&seed=4")


def test_bad_row_of_answers_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "label": "b"}\nnot json\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2"):
        load_answers(f"jsonl:{file}")
