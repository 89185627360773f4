"""The exact values of the pure rewards (conformance 158, 159, 161, 162)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import RewardFault
from worker.rewards.hub import PURE, Reply
from worker.rewards.hub.choices import gpqa
from worker.rewards.hub.dapo import dapo, normalized
from worker.rewards.hub.words import NOTHING, overlap

CITIES = {"choices": ["London", "Paris", "Rome"]}


def judged(kind: str, text: str, label: Any, **columns: Any) -> Any:
    """Return what a pure reward gives to a reply that is its own whole turn."""
    return PURE[kind](Reply(text, label, columns, whole=text))


def test_158_f1_of_a_part_is_two_thirds() -> None:
    found = overlap("hello", "hello world")
    assert found.f1 == pytest.approx(2 / 3)
    assert (found.precision, found.recall) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("given_", "expected", "f1"),
    [
        ("yes", "no", 0.0),
        ("Yes.", "yes", 1.0),
        ("yes it is", "yes", 0.0),
        ("yes", "yes it is", 0.0),
        (None, "hello", 0.0),
        ("", "", 0.0),
        ("nothing", "something", 0.0),
        ("The Hello, world!", "hello a world", 1.0),
        ("world hello", "hello world", 1.0),
        ("hello hello", "hello", pytest.approx(2 / 3)),
        ("theory of an art", "theory of art", 1.0),
    ],
)
def test_158_f1_counts_words_without_articles_punctuation_and_case(
    given_: str | None, expected: str, f1: float
) -> None:
    assert overlap(given_, expected).f1 == f1
    if f1 == 0.0:
        assert overlap(given_, expected) == NOTHING


@pytest.mark.parametrize(
    ("text", "label", "score", "pred"),
    [
        ("Answer: 42", "42", 1.0, "42"),
        ("Answer: 42", 42, 1.0, "42"),
        ("Answer: 41", "42", -1.0, "41"),
        ("It is 42.", "42", -1.0, "[INVALID]"),
        ("Answer: 1\nno, wait\nanswer : 42\n", "42", 1.0, "42"),
        ("x" * 500 + "\nAnswer: 42", "42", 1.0, "42"),
        ("Answer: 42" + " " + "x" * 300, "42", -1.0, "[INVALID]"),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
        ("Answer: $x = 1,234$ dollars", "1234", 1.0, "1234"),
        (r"Answer: \text{Friday}", "Friday", 1.0, "Friday"),
        (r"Answer: \boxed{42}", "42", 1.0, "42"),
        (r"Answer: \sqrt3", r"\sqrt{3}", 1.0, r"\sqrt{3}"),
        (r"Answer: 90^\circ", "90", 1.0, "90"),
        (r"\boxed{42}", "42", -1.0, "[INVALID]"),
    ],
)
def test_159_dapo_scores_the_last_answer_of_the_last_300_characters(
    text: str, label: Any, score: float, pred: str
) -> None:
    assert judged("dapo", text, label) == {"score": score, "acc": score > 0, "pred": pred}


@pytest.mark.parametrize(
    ("text", "score", "pred"),
    [
        (r"\boxed{42}", 1.0, "42"),
        (r"\boxed{41} then \boxed{42}", 1.0, "42"),
        (r"\boxed{42.0}", -1.0, "42.0"),
        (r"\boxed{42}" + "x" * 100, -1.0, "[INVALID]"),
        ("Answer: 42", -1.0, "[INVALID]"),
    ],
)
def test_159_dapo_can_ask_strictly_for_the_box(text: str, score: float, pred: str) -> None:
    expected = {"score": score, "acc": score > 0, "pred": pred}
    assert dapo(text, "42", strict_box=True) == expected
    assert judged("dapo", text, "42", strict_box_verify=True) == expected


@pytest.mark.parametrize(
    ("text", "score"),
    [(r"\boxed{42}", 1.0), (r"\boxed{Answer: 42}", 1.0), (r"\boxed{7}", -1.0), ("42", -1.0)],
)
def test_boxed_dapo_scores_what_is_in_the_box(text: str, score: float) -> None:
    assert judged("boxed_dapo", text, "42")["score"] == score


@given(st.text(max_size=40))
def test_dapo_gives_an_answer_that_repeats_the_label_its_point(label: str) -> None:
    line = label.replace("\n", " ").strip()
    if line and "\r" not in line and "answer" not in line.lower():
        assert judged("dapo", f"Answer: {line}", line)["acc"]
    assert normalized(label) is not None


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        (r"Let me see.</think>It is \boxed{42}", "42", 1.0),
        (r"Let me see.</think>It is \boxed{wrong}", "42", 0.0),
        (r"###Response It is \boxed{42}", "42", 1.0),
        (r"###Response It is \boxed{41}", "42", 0.0),
        (r"It is \boxed{42}", "42", 0.0),  # it never ended its reasoning
        (r"\boxed{42}</think>It is 42", "42", 0.0),
        (r"<think>\boxed{1}</think>\boxed{2}</think>\boxed{42}", 42, 1.0),
        (r"</think>\boxed{42}</think>It is 42", 42, 0.0),
        (r"</think>\boxed{42}", r"so \boxed{42}", 1.0),
        (r"</think>\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"</think>\boxed{42}", "", 0.0),
        ("", "42", 0.0),
    ],
)
def test_deepscaler_is_one_where_the_box_behind_the_reasoning_is_the_label(
    text: str, label: Any, reward: float
) -> None:
    assert judged("deepscaler", text, label) == reward


def test_deepscaler_also_takes_the_models_own_word_that_its_reasoning_ended() -> None:
    reply = Reply(r"\boxed{42}", "42", whole=r"<|final|>\boxed{42}", reasoned=True)
    assert PURE["deepscaler"](reply) == 1.0
    assert PURE["boxed_deepscaler"](Reply(r"\boxed{42}", "42")) == 1.0


@pytest.mark.parametrize(
    ("text", "label", "columns", "reward"),
    [
        ("Answer: A", "A", {}, 1.0),
        ("Answer: B", "A", {}, 0.0),
        ("Answer: b", "B", {}, 1.0),
        ("Answer: B", "A", {"correct_letter": "B"}, 1.0),
        ("Answer: A", 0, {"correct_letter": "b"}, 0.0),
        ("Answer: C", 2, CITIES, 1.0),
        ("Answer: A", 2, CITIES, 0.0),
        ("Answer: Y", "Y", {"valid_letters": "XYZ"}, 1.0),
        ("Answer: Y", 1, {"valid_letters": ["x", "y", "z"]}, 1.0),
        ("Answer: A", "Y", {"valid_letters": "XYZ"}, 0.0),
        ("Paris", "B", CITIES, 1.0),
        ("paris.", 1, CITIES, 1.0),
        ("London", "B", CITIES, 0.0),
        ("The answer is Paris.", "Paris", CITIES, 1.0),
        (r"\boxed{Paris}", "Paris", {}, 1.0),
        ("Answer: B", "Paris", CITIES, 1.0),
        ("Answer: B", "Paris", {"choices": {"A": "London", "B": "Paris"}}, 1.0),
        ("Answer: A", "B", {"choices": {"B": "Paris", "A": "London"}}, 0.0),
        ("Answer: A</think>Answer: B", "B", {}, 1.0),
        ("Answer: A</think>no idea", "A", {}, 0.0),
        ("", "A", {}, 0.0),
        (None, "A", {}, 0.0),
    ],
)
def test_161_gpqa_is_one_where_the_reply_settles_on_the_right_choice(
    text: str | None, label: Any, columns: dict[str, Any], reward: float
) -> None:
    assert gpqa(text, label, columns) == reward


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("**Answer:** (C)", "C"),
        (r"The final answer is $\boxed{\text{C}}$.", "C"),
        (r"Answer: \boxed{c}", "C"),
        ("C is the correct answer.", "C"),
        ("Answer: A. No, wait. Answer: C", "C"),
        ("The answer is a hard one: C", "C"),
        ("The answer because of symmetry: C", "C"),
        ("Option C because A is worse", "C"),
        ("So it is C. A catalyst only speeds it up.", "C"),
        ("CAB", None),
        ("the answer", None),
    ],
)
def test_gpqa_reads_the_letter_that_is_meant(text: str, letter: str | None) -> None:
    given_ = [one for one in "ABCDEFGH" if gpqa(text, one, {}) == 1.0]
    assert given_ == ([] if letter is None else [letter])


@pytest.mark.parametrize("label", [None, True, 99, -1, 0.5, [], ""])
def test_gpqa_has_no_verdict_where_the_row_does_not_say_what_is_right(label: Any) -> None:
    with pytest.raises(RewardFault, match="has no 'correct_letter'") as caught:
        gpqa("Answer: A", label, {})
    assert caught.value.detail == "no_label"


@pytest.mark.parametrize(
    ("kind", "text", "label", "reward"),
    [
        ("boxed_f1", r"so \boxed{hello world}", "hello world", 1.0),
        ("boxed_f1", "hello world", "hello world", 0.0),
        ("boxed_math", r"so \boxed{42}", "42", 1.0),
        ("boxed_math", "42", "42", 0.0),
        ("boxed_gpqa", r"Answer: A, or \boxed{B}", "B", 1.0),
        ("boxed_gpqa", "Answer: B", "B", 0.0),
        ("boxed_deepscaler", r"\boxed{42}", "42", 1.0),
    ],
)
def test_162_boxed_rewards_judge_what_the_last_box_holds(
    kind: str, text: str, label: Any, reward: float
) -> None:
    assert judged(kind, text, label) == reward


@pytest.mark.parametrize("kind", sorted(set(PURE) - {"gpqa", "boxed_gpqa"}))
@pytest.mark.parametrize("label", [None, True, {"a": 1}, ["8"]])
def test_a_row_without_a_usable_label_has_no_verdict(kind: str, label: Any) -> None:
    with pytest.raises(RewardFault, match="needs text or a number") as caught:
        judged(kind, r"\boxed{8}", label)
    assert caught.value.detail == "no_label"


PIECES = [
    *("\\boxed{", "{", "}", "\\", "<answer>", "</answer>", "</think>", "Answer:", " ", "\n"),
    *("A", "1", "answer is ", "$", ",", "a ", "the", "\\frac", "\\text{", "(", ")", "="),
    *("is correct", "\u0663", "\u017f"),
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=30), st.sampled_from(["A", "1", "yes", "\\frac12"])
)
def test_every_pure_reward_is_in_its_range_and_repeats_whatever_the_model_wrote(
    pieces: list[str], label: str
) -> None:
    text = "".join(pieces)
    for kind in PURE:
        reward = judged(kind, text, label)
        score = reward["score"] if isinstance(reward, dict) else reward
        assert score in (-1.0, 1.0) if kind.endswith("dapo") else 0.0 <= score <= 1.0
        assert judged(kind, text, label) == reward


HOSTILE = ["\\boxed{", "{", "<answer>", "\\text{", "answer ", "A ", "Answer:", "\\", " ", "(", "`"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_every_pure_reward_takes_linear_time_of_a_text_made_to_be_quadratic(piece: str) -> None:
    # Searching for the end of every box, tag or run of blanks again takes longer than a test may.
    many = piece * (60_000 // len(piece))
    for text in (f"answer{many}", f"<answer>\\boxed{{{many}}}"):
        for kind in PURE:
            judged(kind, text, "A")
