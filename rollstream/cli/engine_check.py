"""What engines say of themselves to `rollstream doctor`: there, paused, which weights.

Owns the looks and what is to be mended. Never asks for a token: a paused engine would not answer,
and a full one has other work. Invariant: an engine that a worker could use is no finding; what
cannot be known of one is said as a note, and the others are asked all the same.
"""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollstream import health
from rollstream.cli.direct import open_direct
from rollstream.health import NOTE, Finding
from rollstream.urls import NO_NAME_WITH_TLS, is_name_with_tls, shown_url

if TYPE_CHECKING:
    from rollstream.queue.reads import RunInfo
    from rollstream.updates.confirmed import EngineView

MAX_BODY_BYTES = 1 << 20
MAX_ENGINES = 64
"""Of one name; more are not asked."""
_ABSENT = (404, 405)
_OFF = (403, *_ABSENT)
ROUTES = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}
"""What a worker calls, by `engine.vllm_route`."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one engine says; what it does not say is None."""

    problem: str = ""
    """Why it is of no use; empty where it answers."""
    label: str | None = None
    """Of its weights."""
    paused: bool | None = None


def engine_findings(
    urls: Sequence[str],
    kind: str,
    *,
    timeout_s: float,
    info: RunInfo | None,
    vllm_route: str = "generate",
    views: Sequence[EngineView] = (),
) -> tuple[dict[str, str], list[Finding]]:
    """Ask every engine; return a word on each, and what is to be mended or known.

    Args:
        urls: as configured, names (`dns+`) and routers (`router+`) among them.
        kind: `engine.kind`.
        timeout_s: for each question.
        info: the run, to compare versions with; None where there is none.
        vllm_route: `engine.vllm_route`.
        views: the engines as the run's live workers see them.
    """
    words: dict[str, str] = {}
    findings: list[Finding] = []
    for url in urls:
        addresses, problem = _addresses(url, timeout_s)
        if problem:
            words[shown_url(url)] = problem
            findings.append(_gone(url, problem))
        for address in addresses[:MAX_ENGINES]:
            said = look(kind, address, timeout_s, vllm_route)
            words[shown_url(address)] = _word(said)
            findings += _judge(address, said, info)
    findings += [_raw(view.url) for view in views if view.states["refused"]]
    return words, findings


def look(kind: str, url: str, timeout_s: float, vllm_route: str = "generate") -> Said:
    """Ask one engine in its own protocol."""
    try:
        return (
            _look_vllm(url, timeout_s, ROUTES[vllm_route])
            if kind == "vllm"
            else _look_sglang(url, timeout_s)
        )
    except (OSError, ValueError) as error:
        return Said(problem=str(getattr(error, "reason", error)) or type(error).__name__)


def _look_sglang(url: str, timeout_s: float) -> Said:
    status, info = _get(f"{url}/model_info", timeout_s)
    if status != 200:
        return Said(problem=f"/model_info: status {status}")
    ready, _ = _get(f"{url}/ready", timeout_s)
    paused = None if ready in _ABSENT else ready == 503
    return Said(label=_label(info.get("weight_version")), paused=paused)


def _look_vllm(url: str, timeout_s: float, route: str) -> Said:
    # As a worker does first: no server runs such a request, but one that lacks the route says so.
    status, _ = _get(url + route, timeout_s, body=b"{}")
    if status in _OFF:
        return Said(
            problem=f"{route}: status {status}: start vllm serve with --enable-scale-out, or set "
            "engine.vllm_route"
        )
    paused_status, paused = _get(f"{url}/is_paused", timeout_s)
    info_status, info = _get(f"{url}/weight_info", timeout_s)
    if paused_status in _ABSENT and info_status in _ABSENT:
        status, _ = _get(f"{url}/health", timeout_s)
        return Said(problem="" if status == 200 else f"/health: status {status}")
    is_paused = paused.get("is_paused") if paused_status == 200 else None
    return Said(
        label=_label(info.get("weight_version")) if info_status == 200 else None,
        paused=is_paused if isinstance(is_paused, bool) else None,
    )


def _judge(url: str, said: Said, info: RunInfo | None) -> Iterator[Finding]:
    if said.problem:
        yield _gone(url, said.problem)
        return
    if info is None:
        return
    version = _version_of(said.label, info.labels)
    if version is not None and version < info.version:
        yield Finding(
            "engine", health.PROBLEM,
            f"{shown_url(url)} serves version {version}, the run is at {info.version}",
            "it gets no calls before it reports the run's (engine.require_version)",
            "Give it the weights, then POST /update_weight_version "
            f'{{"new_version": "{info.version}", "abort_all_requests": false}}',
        )  # fmt: skip
    elif version is None and info.version > 0:
        yield Finding(
            "engine", NOTE,
            f"{shown_url(url)} says no version that the run knows ({said.label or 'none'})",
            "its samples count as those of the version that was current when they were asked for",
            "Have updating_weights tell engines (post=True), or name the label: "
            "set_weight_version(version, label=…); vLLM says it in dev mode only "
            "(VLLM_SERVER_DEV_MODE=1)",
        )  # fmt: skip
    if said.paused and info.state == "running":
        yield Finding(
            "engine", health.PROBLEM,
            f"{shown_url(url)} is paused while the run is running",
            "its calls wait, and it gets no new ones",
            "If no update is under way: POST /continue_generation {} (SGLang), /resume (vLLM)",
        )  # fmt: skip


def _gone(url: str, problem: str) -> Finding:
    return Finding("engine", health.PROBLEM, f"no engine answers at {shown_url(url)} ({problem})",
                   "workers lease nothing while none does",
                   "Start it, or correct engine.urls and engine.kind")  # fmt: skip


def _raw(url: str) -> Finding:
    return Finding("engine", health.PROBLEM, f"{shown_url(url)} reports raw log-probs",
                   "at a temperature other than 1 they are not those of what was sampled: workers "
                   "refuse it",
                   "Start it with --logprobs-mode processed_logprobs")  # fmt: skip


def _version_of(label: str | None, labels: Mapping[str, int]) -> int | None:
    """Return the version that a label means, as workers read it; None for an unknown one."""
    if label is None:
        return None
    if label in labels:
        return labels[label]
    return int(label) if label.isascii() and label.isdigit() and len(label) <= 18 else None


def _word(said: Said) -> str:
    if said.problem:
        return said.problem
    weights = "version unknown" if said.label is None else f"weights {said.label!r}"
    return f"answers, {weights}" + (", paused" if said.paused else "")


def _label(value: Any) -> str | None:
    return str(value)[:64] if isinstance(value, str | int) else None


def _addresses(url: str, timeout_s: float) -> tuple[list[str], str]:
    """Return the engines that an entry of `engine.urls` stands for, or what is wrong with it."""
    if is_name_with_tls(url):
        return [], f"expected {NO_NAME_WITH_TLS}"
    if url.startswith("dns+"):
        return _resolved(url.removeprefix("dns+"))
    if url.startswith("router+"):
        return _listed(url.removeprefix("router+"), timeout_s)
    return [url], ""


def _resolved(url: str) -> tuple[list[str], str]:
    parts = urlsplit(url)
    port = parts.port or 80
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], f"the name cannot be looked up: {error.strerror or error}"
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts], ""


def _listed(url: str, timeout_s: float) -> tuple[list[str], str]:
    try:
        status, body = _get(f"{url}/workers", timeout_s)
        rows: Any = body.get("workers", ())
        if status in _ABSENT:
            status, body = _get(f"{url}/list_workers", timeout_s)
            rows = body.get("urls", ())
    except (OSError, ValueError) as error:
        return [], f"the router: {getattr(error, 'reason', error)}"
    if status != 200 or not isinstance(rows, list):
        return [], f"the router lists no workers: status {status}"
    named = (row.get("url") if isinstance(row, dict) else row for row in rows)
    # `@rank` behind an address is the router's own.
    found = [re.sub(r"@\d+$", "", name) for name in named if isinstance(name, str)]
    return list(dict.fromkeys(found)), "" if found else "the router has no workers"


def _get(url: str, timeout_s: float, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    """Return status and JSON object of a page, posted to where there is a body; {} for none."""
    headers = {} if body is None else {"content-type": "application/json"}
    try:
        request = urllib.request.Request(url, body, headers)
        with open_direct(request, timeout=timeout_s) as answer:
            raw, status = answer.read(MAX_BODY_BYTES), int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {}
    try:
        said = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):
        said = {}
    return status, said if isinstance(said, dict) else {}
