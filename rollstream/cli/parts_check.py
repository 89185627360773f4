"""The parts beside server, run and engines, for `doctor`: tokenizer, verifiers, exporter, versions.

Owns the questions and what is to be mended. Never imports an app: the tokenizer's self-test is the
worker's own `doctor`, run as a process. Invariant: each question is bounded, and one that cannot be
asked is a finding too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rollstream
from rollstream.cli.apps import find_app
from rollstream.cli.direct import open_direct
from rollstream.cli.exits import CommandError
from rollstream.health import NOTE, PROBLEM, Finding
from rollstream.queue.reads import pairs_of
from rollstream.updates.confirmed import plain
from rollstream.wire import WIRE_VERSION

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.settings import Settings

SELF_TEST_S = 60.0
VERIFY = "verify"
"""The queue of isolated jobs."""
MAX_VERIFIERS = 64
_VERSION = re.compile(r"rollstream (\S+), wire (\d+)")
_ANY_HOST = ("0.0.0.0", "::", "")


# --- the tokenizer -------------------------------------------------------------------------------
def tokenizer_findings(settings: Settings, file: str) -> tuple[str, list[Finding]]:
    """Try the tokenizer and its renderer as a worker does at its start; a word, and findings."""
    if not settings.model.tokenizer:
        return "none is named", []
    try:
        command = [sys.executable, "-m", find_app("worker"), "doctor", "--json", "--config", file]
        done = subprocess.run(
            command,
            cwd=Path(rollstream.__file__).resolve().parent.parent,
            capture_output=True,
            text=True,
            timeout=SELF_TEST_S,
            check=False,
        )
        said: Any = json.loads(done.stdout)
    except (CommandError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        return "not tried", [_untried(str(error))]
    if not said["ok"]:
        return "refused", [
            Finding(
                "tokenizer",
                PROBLEM,
                plain(str(said["error"])),
                "workers do not start with it",
                "rollstream worker doctor --families names what model.renderer takes; "
                "docs/tokens.md",
            )
        ]
    warnings = [
        Finding(
            "tokenizer",
            NOTE,
            plain(str(warning)),
            "workers warn of it at their start",
            "docs/tokens.md",
        )
        for warning in said["warnings"]
    ]
    return f"fit, {said['resolved']}", warnings


def _untried(why: str) -> Finding:
    return Finding("tokenizer", NOTE, f"the tokenizer could not be tried: {plain(why)[:300]}",
                   "a worker refuses one that is not fit at its start",
                   "pip install 'rollstream[service]' here, or run python -m worker doctor "
                   "where a worker runs")  # fmt: skip


# --- verifiers -----------------------------------------------------------------------------------
def needs_verifier(settings: Settings) -> list[str]:
    """Return the environments of which a reward or a tool runs isolated."""
    return [
        name
        for name, env in settings.envs().items()
        if env.reward.kind in env.reward.isolated
        or env.reward.isolated_share > 0
        or "python" in env.tools
    ]


def verifier_findings(queue: BlockingQueue, envs: list[str]) -> tuple[int | None, list[Finding]]:
    """Return how many verifiers serve the jobs' server (None: unknown), and what is missing."""
    members, waiting = queue.ask((("SMEMBERS", f"rq:workers:{VERIFY}"),
                                  ("LLEN", f"rq:queue:{VERIFY}")))  # fmt: skip
    if isinstance(members, Exception) or isinstance(waiting, Exception):
        return None, []
    names = sorted(members)[:MAX_VERIFIERS]
    alive = queue.ask((("EXISTS", *names),))[0] if names else 0
    if isinstance(alive, int) and alive > 0:
        return alive, []
    return 0, [
        Finding(
            "verifier",
            PROBLEM,
            f"no verifier is alive, and {', '.join(envs)} need{'s' * (len(envs) == 1)} one "
            f"({waiting} jobs wait)",
            "isolated rewards and tools get no answer, and their samples fail",
            "python -m worker.isolation.verifier; docker compose up -d verifier",
        )
    ]


# --- the exporter --------------------------------------------------------------------------------
def exporter_findings(settings: Settings, timeout_s: float) -> tuple[str, list[Finding]]:
    """Ask the exporter whether it is there and reads the run; a word, and findings."""
    table = settings.exporter
    host = "127.0.0.1" if table.host in _ANY_HOST else table.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{table.port}"
    if not table.port:
        return "any port", []
    try:
        with open_direct(f"{url}/readyz", timeout=timeout_s) as answer:
            return f"ready at {url}" if answer.status == 200 else f"status {answer.status}", []
    except urllib.error.HTTPError as error:
        with error:
            said = plain(error.read(300).decode(errors="replace")).strip()
        return f"not ready: {said}", [
            Finding(
                "exporter",
                PROBLEM,
                f"the exporter at {url} is not ready: {said}",
                "what Prometheus has of the run stands still",
                "It wants the run and its Redis: compare its run.name and redis.url",
            )
        ]
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        level = PROBLEM if "exporter" in settings.model_fields_set else NOTE
        return "not there", [
            Finding(
                "exporter",
                level,
                f"no exporter answers at {url} ({why})",
                "queues, groups and the trainer's waits are not measured; the run goes on",
                "Start it: rollstream exporter; or it is elsewhere (exporter.host)",
            )
        ]


# --- versions ------------------------------------------------------------------------------------
def abouts_of(queue: BlockingQueue, alive: Container[str]) -> dict[str, str]:
    """Return what workers and aggregators that are alive say of where they run."""
    reply = queue.ask((("HGETALL", f"{queue.prefix}wh"),))[0]
    if isinstance(reply, Exception):
        return {}
    said = {_text(name): _text(about) for name, about in pairs_of(reply)}
    return {name: about for name, about in said.items() if name in alive}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def version_findings(about: Mapping[str, str]) -> tuple[dict[str, int], list[Finding]]:
    """Judge what processes that are alive say of themselves.

    Args:
        about: process → what it said of where it runs.

    Returns:
        How many are of which version; `unknown` for those that do not say.
    """
    versions: Counter[str] = Counter()
    other_wire: list[str] = []
    for name, text in sorted(about.items()):
        found = _VERSION.search(text)
        versions[found[1] if found else "unknown"] += 1
        if found and int(found[2]) != WIRE_VERSION:
            other_wire.append(f"{plain(name)} (wire {found[2]})")
    findings = []
    if other_wire:
        findings.append(Finding(
            "versions", PROBLEM, f"other wire versions than {WIRE_VERSION} here: "
            f"{', '.join(other_wire[:8])}",
            "a record that is newer than its reader is refused",
            "Update trainer and this machine first, workers last"))  # fmt: skip
    known = set(versions) - {"unknown"}
    if len(known) > 1 or known - {rollstream.__version__}:
        listed = ", ".join(f"{count} of {plain(name)}" for name, count in sorted(versions.items()))
        findings.append(Finding(
            "versions", NOTE, f"processes of the run are of {listed}; this is "
            f"{rollstream.__version__}", "they understand one another within one wire version",
            "Finish the update: restart those of the other version; nothing is lost"))  # fmt: skip
    return dict(versions), findings
