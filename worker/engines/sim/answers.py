"""The table that the scripted policy answers from: question text → answer.

Owns the reading of `--answers`: the same two kinds of source that the producer reads, with a small
parser of its own, so that an auditor can build the table again and shares nothing with anybody.
Never guesses: a source that it cannot read is an error.

    reasoning_gym:gsm_symbolic?size=200&seed=7      jsonl:prompts.jsonl?prompt=question&label=answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from rollstream.errors import ConfigError

_GYM_DEFAULTS = {"size": 500, "seed": 0}
"""Those of the producer's source; a data set without a seed is another one in every process."""


def load_answers(spec: str) -> dict[str, str]:
    """Return question text (stripped) → answer text.

    Raises:
        ConfigError: an unknown kind, an unknown data set, a bad row.
    """
    if not spec:
        return {}
    kind, separator, rest = spec.partition(":")
    name, _, query = rest.partition("?")
    options = dict(parse_qsl(query))
    if separator and kind == "reasoning_gym":
        return _from_reasoning_gym(name, options)
    if separator and kind == "jsonl":
        return _from_jsonl(Path(name), options)
    raise ConfigError(
        f"--answers {spec!r}: expected reasoning_gym:NAME?size=…&seed=… or jsonl:PATH"
    )


def _from_reasoning_gym(name: str, options: Mapping[str, str]) -> dict[str, str]:
    import reasoning_gym

    parameters = {**_GYM_DEFAULTS, **{key: _value(text) for key, text in options.items()}}
    try:
        data = reasoning_gym.create_dataset(name, **parameters)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"--answers reasoning_gym:{name}: {error}") from None
    return {str(item["question"]).strip(): str(item["answer"]) for item in data}


def _value(text: str) -> Any:
    """Return what the text is as JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_jsonl(path: Path, options: Mapping[str, str]) -> dict[str, str]:
    prompt_key, label_key = options.get("prompt", "prompt"), options.get("label", "label")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--answers jsonl:{path}: {error.strerror or error}") from None
    answers = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question = question_of(row[prompt_key])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--answers jsonl:{path}:{number}: no {prompt_key!r} in it: {error}"
            ) from None
        label = row.get(label_key)
        if question and label is not None:
            answers[question] = label if isinstance(label, str) else json.dumps(label)
    return answers


def question_of(prompt: Any) -> str:
    """Return the text that the policy looks up: a plain prompt, or the last user message's.

    Raises:
        TypeError: neither text nor messages.
    """
    if isinstance(prompt, str):
        return prompt.strip()
    for message in reversed(prompt):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content)
            return str(content).strip()
    return ""
