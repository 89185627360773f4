"""Write a small real Qwen3 model that writes tool calls, without a download and without training.

Owns the grammar that its weights speak, and the files of its folder. Never runs at a worker, and is
no language model: it cannot do what it writes about. Invariant: the model is an ordinary
`Qwen3ForCausalLM` over the real vocabulary; the same seed gives the same weights.

    python -m examples.tiny_model .cache/tiny --seed 0

How it speaks. Every token of the grammar has a direction of its own in the residual stream, and the
output row of a token is the sum of the directions of the tokens that it may follow, each times its
log-probability: a Markov chain in one matrix. Attention and MLP are random, of moderate size:
every earlier token moves every later log-prob, by half a nat or so, and so does the seed. All other
tokens of the vocabulary have a small output row, and together the mass `REST`: unusual tokens,
splits that the vocabulary would not make, and turns that end oddly do occur.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

HIDDEN = 64
LAYERS = 2
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 16
VOCABULARY = 151_936
"""Rows of Qwen3's embedding; the tokenizer has 151,669 ids, and the model may sample the others
too, as the real one could."""
REST = 0.002
"""Mass of everything outside the grammar, a token, at T = 1."""
_ATTENTION, _MLP = 0.6, 0.4
"""Size of a layer's contributions beside the token's own direction, which has size 1."""
_IN_GRAMMAR = 0.25
"""How much of that may fall into the grammar's own directions: with all of it, some seeds would
hardly ever write a call that is valid."""
_ANY = "any other token"
_LOW, _HIGH = dict.fromkeys("123450", 1.0), dict.fromkeys("6789", 1.0)
"""Digits of the first and of the second argument: what may follow differs."""
_WORDS = dict.fromkeys((" one", " two", " three", " four", " five"), 1.0)

Chain = dict[str, dict[str, float]]
"""Token -> what may follow it, weighted."""


def grammar(calls: float = 0.78) -> Chain:
    r"""Return the chain; a turn begins behind the `\n` of the generation prompt.

    Args:
        calls: share of turns that begin with a tool call.
    """
    talk = 1.0 - calls
    low = {**dict.fromkeys(_LOW, 5.0), ',"': 38.0, "}}": 30.0, "}": 2.0}
    high = {**dict.fromkeys(_HIGH, 6.0), "}}": 70.0, "}": 4.0, ',"': 2.0}
    chain: Chain = {
        "\n": {"<tool_call>": calls - 0.08, "<think>": 0.1, " The": talk - 0.02},
        "<think>": {" I": 1.0},
        " I": {" must": 9.0, " add": 1.0},
        " must": {" add": 1.0},
        " add": {" them": 1.0},
        " them": {" first": 1.0, " now": 1.0},
        " first": {"</think>": 10.0, "<tool_call>": 2.0},  # a draft, inside the reasoning
        " now": {"</think>": 10.0, ".": 1.0},
        "</think>": {"<tool_call>": 8.0, " The": 2.0},
        "<tool_call>": {'{"': 9.0, ' {"': 1.0},
        '{"': {"name": 60.0, "arguments": 1.0},  # the second is a call without a name
        ' {"': {"name": 1.0},
        "name": {'":"': 1.0},
        '":"': {"add": 16.0, "sub": 4.0, "ad": 3.0, "fly": 1.0},
        "ad": {"d": 1.0},  # two tokens for what the vocabulary has as one
        "d": {'","': 1.0},
        '","': {"arguments": 1.0},
        "arguments": {'":{"': 1.0},
        '":{"': {"a": 30.0, "b": 1.0},
        "a": {'":': 1.0},
        '":': {**_LOW, "0": 0.05, "-": 1.0},
        "-": {**_LOW, "0": 0.05},
        "b": {'"': 1.0},
        '"': {" :": 1.0},
        " :": _HIGH,
        ',"': {"b": 40.0, "a": 1.0},
        "}}": {"</tool_call>": 30.0, "}": 1.0},
        "}": {"}": 5.0, "</tool_call>": 5.0, "<|im_end|>": 1.0},  # one of them is not enough
        "</tool_call>": {"<|im_end|>": 82.0, "<tool_call>": 15.0, "<|endoftext|>": 3.0},
        " The": {" sum": 1.0},
        " sum": {" is": 1.0},
        " is": _WORDS,
        ".": {"<|im_end|>": 30.0, "<|endoftext|>": 1.0, " I": 1.0},
        _ANY: {"<|im_end|>": 3.0, ".": 2.0, "}}": 2.0, ',"': 1.0, "<tool_call>": 1.0},
    }
    chain |= dict.fromkeys(_LOW, low) | dict.fromkeys(_HIGH, high)
    chain |= {token: {**_WORDS, ".": 10.0} for token in _WORDS}
    return chain | {token: {'","': 1.0} for token in ("add", "sub", "fly")}


def write_tiny_model(
    folder: str | Path,
    *,
    tokenizer_json: str | Path,
    seed: int = 0,
    calls: float = 0.78,
    rest: float = REST,
) -> Path:
    """Write config, weights, generation config and tokenizer into `folder`; return it.

    Unit: 78 MB, two seconds with the imports.

    Args:
        folder: made where it is missing; its files are replaced.
        tokenizer_json: Qwen3's (`python -m examples.vocabulary`).
        seed: two seeds are two versions of a policy: one grammar, other log-probs.
        calls: share of turns that call a tool.
        rest: mass of the tokens outside the grammar.

    Raises:
        ValueError: the vocabulary is not Qwen3's.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config

    chain = _with_ids(grammar(calls), Path(tokenizer_json))
    ends = [151_645, 151_643]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        eos_token_id=ends[0],
        bos_token_id=ends[1],
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    weights = {name: w.contiguous() for name, w in _weights(chain, seed, rest).items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=ends, pad_token_id=ends[1]
    ).save_pretrained(target)
    shutil.copyfile(tokenizer_json, target / "tokenizer.json")
    return target


def _with_ids(chain: Chain, tokenizer_json: Path) -> dict[int, dict[int, float]]:
    """Return the chain over ids, as log-probabilities; -1 is any other token."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))

    def number(text: str) -> int:
        if text == _ANY:
            return -1
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ValueError(f"{str(tokenizer_json)!r} has no one token for {text!r}: {ids}")
        return int(ids[0])

    if number("<|im_end|>") != 151_645:
        raise ValueError(f"{str(tokenizer_json)!r} is not Qwen3's vocabulary")
    return {
        number(before): {
            number(after): math.log(weight / sum(row.values())) for after, weight in row.items()
        }
        for before, row in chain.items()
    }


def _weights(chain: dict[int, dict[int, float]], seed: int, rest: float) -> dict[str, Any]:
    """Return the state dictionary; axes V vocabulary, H hidden, S states of the chain."""
    import torch

    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * scale

    # Tokens that are followed by the same are one state: fewer directions, and digits stay free.
    states: dict[tuple[tuple[int, float], ...], int] = {}
    state_of = {t: states.setdefault(tuple(row.items()), len(states)) for t, row in chain.items()}
    if len(states) > HIDDEN:
        raise ValueError(f"{len(states)} states do not fit into {HIDDEN} dimensions")
    directions = _orthonormal(random)[: len(states)]  # [S, H]
    # Size 1 a dimension, as a norm layer would leave it; what is a token's own is a fifth of that.
    inputs = normal(VOCABULARY, HIDDEN, scale=0.2) + directions[state_of[-1]] * HIDDEN**0.5
    for token, state in state_of.items():
        if token >= 0:
            inputs[token] += (directions[state] - directions[state_of[-1]]) * HIDDEN**0.5
    # Logits of the rest are noise around 0, of variance 1/4: their mass is V e^(1/8).
    outputs = normal(VOCABULARY, HIDDEN, scale=0.5 / HIDDEN**0.5)
    level = math.log(VOCABULARY) + 0.125 - math.log(rest)
    for row, state in states.items():
        for token, log_probability in row:
            outputs[token] += directions[state] * (level + log_probability) * 1.12 / HIDDEN**0.5
    weights = {
        "model.embed_tokens.weight": inputs,
        "lm_head.weight": outputs,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    damp = torch.eye(HIDDEN) - (1.0 - _IN_GRAMMAR) * (directions.T @ directions)
    for layer in range(LAYERS):
        weights |= {f"model.layers.{layer}.{k}": w for k, w in _layer(normal, damp).items()}
    return weights


def _orthonormal(random: Any) -> Any:
    """Return [H, H] of entries +-1/sqrt(H): exact, whatever a machine's linear algebra rounds."""
    import torch

    matrix = torch.ones(1, 1)
    while len(matrix) < HIDDEN:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (HIDDEN,), generator=random) * 2 - 1
    return matrix[torch.randperm(HIDDEN, generator=random)] * signs / HIDDEN**0.5


def _layer(normal: Any, damp: Any) -> dict[str, Any]:
    import torch

    fan_in = HIDDEN**-0.5
    sizes = {"q": HEADS * HEAD_SIZE, "k": KEY_HEADS * HEAD_SIZE, "v": KEY_HEADS * HEAD_SIZE}

    def damped(matrix: Any) -> Any:
        return (damp.double() @ matrix.double()).float()

    layer = {
        f"self_attn.{n}_proj.weight": normal(s, HIDDEN, scale=fan_in) for n, s in sizes.items()
    }
    out = _ATTENTION * (HEADS * HEAD_SIZE) ** -0.5
    return layer | {
        "self_attn.o_proj.weight": damped(normal(HIDDEN, HEADS * HEAD_SIZE, scale=out)),
        # Scores of size 2: every token attends to a few places more than to the others.
        "self_attn.q_norm.weight": torch.full((HEAD_SIZE,), 1.4),
        "self_attn.k_norm.weight": torch.full((HEAD_SIZE,), 1.4),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "mlp.gate_proj.weight": normal(2 * HIDDEN, HIDDEN, scale=fan_in),
        "mlp.up_proj.weight": normal(2 * HIDDEN, HIDDEN, scale=fan_in),
        "mlp.down_proj.weight": damped(
            normal(HIDDEN, 2 * HIDDEN, scale=_MLP * (2 * HIDDEN) ** -0.5)
        ),
    }


def replies(folder: Path, count: int, *, temperature: float = 1.0, seed: int = 0) -> list[str]:
    """Sample `count` first replies to one prompt with transformers alone, as text."""
    import tokenizers
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is 1 + 7?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids] * count)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, temperature=temperature,
            top_k=0, top_p=1.0,
        )  # fmt: skip
    texts = tokenizer.decode_batch(found[:, ids.shape[1] :].tolist(), skip_special_tokens=False)
    return [text.replace("<|endoftext|>", "") for text in texts]


def valid_call(reply: str) -> bool | None:
    """Return whether the first call of a reply is JSON with a name; None where it has no call."""
    _, opened, rest = reply.partition("<tool_call>")
    if not opened:
        return None
    block, closed, _ = rest.partition("</tool_call>")
    try:
        found = json.loads(block)
    except ValueError:
        return False
    return bool(closed) and isinstance(found, dict) and "name" in found


def main() -> None:
    """Write the model, and say how it speaks."""
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/qwen3/tokenizer.json"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replies", type=int, default=64, help="sampled to say how it speaks")
    options = parser.parse_args()
    folder = write_tiny_model(options.folder, tokenizer_json=options.tokenizer, seed=options.seed)
    print(folder)
    if options.replies:
        texts = replies(folder, options.replies)
        judged = [valid_call(text) for text in texts]
        print(*(repr(text) for text in texts[:4]), sep="\n")
        counts = [judged.count(answer) for answer in (True, False, None)]
        print(f"of {len(texts)} replies at T = 1: {counts[0]} with a valid call, ", end="")
        print(f"{counts[1]} with a malformed one, {counts[2]} without")


if __name__ == "__main__":
    main()
