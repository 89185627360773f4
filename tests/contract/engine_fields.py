"""Which fields, defaults and paths the engines' own source names: read from their wheels, and kept.

Owns `tests/data/engine_fields.json`, which the contract tests hold our requests and replies
against, and how it is made: `python -m tests.contract.engine_fields` (pip has to reach a package
index; about 3 MB are read, of wheels of 39 and 336 MB). Never imports an engine: their modules need
PyTorch, so class bodies are read as syntax. Invariant: the file says what these versions of the
engines say, and tests/ops/test_engine_wheels.py reads the wheels again.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import wheels

FIXTURE = Path(__file__).parents[1] / "data" / "engine_fields.json"
SGLANG, VLLM = "sglang==0.5.23", "vllm==0.33.0"

_TOKENS = "vllm/entrypoints/scale_out/token_in_token_out/"
CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    SGLANG: {
        "sglang/api/v1/api_types.py": (
            "GenerateRequest", "SamplingParams", "GenerateResponse", "GenerateMetaInfo",
            "FinishStop", "FinishLength", "FinishAbort", "WeightVersionSpan", "AbortRequest",
            "GetModelInfoResponse",
        ),
        "sglang/srt/managers/io_struct.py": (
            "GenerateReqInput", "AbortReq", "UpdateWeightVersionReqInput",
            "PauseGenerationReqInput", "ContinueGenerationReqInput",
        ),
    },
    VLLM: {
        f"{_TOKENS}protocol.py": (
            "GenerateRequest", "GenerateLogProb", "GenerateLogProbsContent", "GenerateLogProbs",
            "GenerateChoiceBase", "GenerateTokensChoice", "GenerateResponseBase",
            "GenerateTokensResponse", "GenerateStreamChoiceBase", "GenerateTokensStreamChoice",
            "GenerateStreamResponseBase", "GenerateTokensStreamResponse",
        ),
        "vllm/entrypoints/openai/completion/protocol.py": (
            "CompletionRequest", "CompletionLogProbs", "CompletionResponseChoice",
            "CompletionResponse", "CompletionResponseStreamChoice", "CompletionStreamResponse",
        ),
        "vllm/entrypoints/serve/engine/protocol.py": (
            "UsageInfo", "PromptTokenUsageInfo", "ErrorInfo", "ErrorResponse",
        ),
        "vllm/entrypoints/generate/base/protocol.py": (
            "SpeculativeDecodingMetrics", "PerRequestMetrics", "StreamOptions",
        ),
        "vllm/sampling_params.py": ("SamplingParams", "StructuredOutputsParams"),
        "vllm/outputs.py": ("WeightVersionSpan",),
    },
}  # fmt: skip
"""{wheel: {file: classes}}"""
PATHS: dict[str, tuple[str, ...]] = {
    SGLANG: ("sglang/srt/entrypoints/http_server.py",),
    VLLM: (
        f"{_TOKENS}api_router.py",
        "vllm/entrypoints/rl/online/api_router.py",
        "vllm/entrypoints/openai/completion/api_router.py",
        "vllm/entrypoints/serve/instrumentator/health.py",
    ),
}
"""{wheel: files whose routes are of interest}"""
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    SGLANG: {
        "sglang/srt/managers/tokenizer_manager.py": (
            'meta_info["routed_experts"]',
            'meta_info["indexer_topk"]',
            'meta_info["spec_num_correct_drafts"]',
            'meta_info["spec_num_proposed_drafts"]',
            'meta_info["spec_verify_ct"]',
            "{**self.preferred_sampling_params, **obj.sampling_params}",
            "is_stream and self.incremental_streaming_output",
            "meta_info[key] = meta_info[key][last_output_offset:]",
            '"completion_tokens": recv_obj.completion_tokens[i]',
            "output_ids = [output_ids[-1]] if len(output_ids) > 0 else []",
        ),
        "sglang/srt/entrypoints/http_server.py": (
            'yield b"data: " + dumps_json(out) + b"\\n\\n"',
            'yield b"data: [DONE]\\n\\n"',
            '"code": getattr(e, "status_code", 400)',
            'media_type="text/event-stream"',
        ),
        "sglang/srt/managers/scheduler_components/output_streamer.py": (
            "req.sampling_params.stream_interval or self.default_stream_interval",
            "or num_unsent >= stream_interval",
            "or (req.send_token_offset == 0 and num_unsent > 0)",
            "self.weight_versions.append(None)",
        ),
    },
    VLLM: {
        f"{_TOKENS}serving.py": (
            "generate-tokens-",
            "-9999.0",
            "RequestOutputKind.DELTA if request.stream",
            'yield "data: [DONE]\\n\\n"',
            "if include_usage:",
        ),
        "vllm/entrypoints/openai/completion/serving.py": (
            "cmpl-",
            "{request_id}-{i}",
            'yield "data: [DONE]\\n\\n"',
            "if include_usage:",
        ),
        "vllm/v1/engine/output_processor.py": (
            "stream_interval = max(sampling_params.stream_interval, stream_interval)",
            "if finished and self.routed_experts_chunks:",
            "logprobs[-num_new_tokens:] if num_new_tokens else logprobs[:0]",
        ),
        "vllm/entrypoints/serve/engine/serving.py": ("X-Request-Id",),
        "vllm/entrypoints/scale_out/factories.py": ("--enable-scale-out", "HTTPStatus.FORBIDDEN"),
        "vllm/v1/engine/core.py": ('self._weight_version = "default"',),
    },
}
"""{wheel: {file: what must stand in it}}: facts that no class says."""
_VERBS = frozenset({"get", "post", "put", "delete", "api_route", "add_api_route"})


def fields_of(source: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return {class: {"bases": [...], "fields": {name: its default's source, or None}}}."""
    wanted, found = set(names), {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name not in wanted:
            continue
        fields = {
            line.target.id: None if line.value is None else ast.unparse(line.value)
            for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            if not line.target.id.startswith("_")
        }
        found[node.name] = {"bases": [ast.unparse(base) for base in node.bases], "fields": fields}
    missing = wanted - set(found)
    if missing:
        raise LookupError(f"no class {', '.join(sorted(missing))}")
    return {name: found[name] for name in names}


def paths_of(source: str) -> list[str]:
    """Return the paths that a module of routes serves."""
    found = {
        call.args[0].value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in _VERBS and call.args
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }
    return sorted(path for path in found if path.startswith("/"))


def _members(wheel: str) -> list[str]:
    return [*dict.fromkeys([*CLASSES[wheel], *PATHS[wheel], *WORDS[wheel]])]


def facts_of(wheel: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what is kept of one wheel."""
    classes: dict[str, Any] = {}
    for member, names in CLASSES[wheel].items():
        module = Path(member).stem if member.startswith("sglang") else ""
        for name, fields in fields_of(texts[member], names).items():
            classes[f"{module}.{name}" if module else name] = fields
    for member, words in WORDS[wheel].items():
        for word in words:
            if word not in texts[member]:
                raise LookupError(f"{wheel}: {member} does not say {word!r} any more")
    paths = sorted({path for member in PATHS[wheel] for path in paths_of(texts[member])})
    return {"wheel": wheel, "classes": classes, "paths": paths}


def read_wheel(wheel: str) -> tuple[dict[str, Any], int]:
    """Return what is kept of one wheel, and how many bytes were read of it.

    Raises:
        NoWheelError: no package index can be reached.
        LookupError: the wheel does not say something any more.
    """
    texts, num_bytes = wheels.read_members(wheels.find(wheel), _members(wheel))
    return facts_of(wheel, texts), num_bytes


def load() -> dict[str, Any]:
    """Return what is kept, {"sglang": …, "vllm": …}."""
    kept: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))
    return kept


def main() -> int:
    """Write the file anew."""
    found = {}
    for name, wheel in (("sglang", SGLANG), ("vllm", VLLM)):
        found[name], num_bytes = read_wheel(wheel)
        sys.stdout.write(f"{wheel}: {num_bytes / 1e6:.1f} MB read\n")
    FIXTURE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
