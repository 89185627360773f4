"""`rollstream doctor`: is everything fit for a run? What is not, why it matters, what to do.

Owns the list of questions. Never writes to a server. Invariant: whatever cannot be asked is a
finding too, and the rest is asked all the same; exit code 1 means that something is to be mended.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from rollstream import health
from rollstream.cli.engine_check import engine_findings
from rollstream.cli.exits import OK, PROBLEM, USAGE, CommandError
from rollstream.cli.logprobs import rescored, table
from rollstream.cli.parts_check import (
    abouts_of,
    exporter_findings,
    needs_verifier,
    tokenizer_findings,
    verifier_findings,
    version_findings,
)
from rollstream.cli.reach import no_run, queue_of, reached, url_of
from rollstream.cli.rights import right_findings
from rollstream.cli.view import print_json, print_text
from rollstream.errors import ConfigError, RunMismatch
from rollstream.health import NOTE, Finding
from rollstream.queue import calls
from rollstream.removal import alive_of
from rollstream.runs import list_runs
from rollstream.updates import confirmed
from rollstream.urls import scrub, shown_url

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.queue.reads import RunInfo
    from rollstream.settings import Settings
    from rollstream.updates.confirmed import EngineView

PINGS = 5
_ENDED = ("ended", "failed", "aborting")


@dataclass(slots=True)
class Report:
    """What was found."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Figures that people want to see whether or not something is wrong."""
    findings: list[Finding] = field(default_factory=list)

    def problem(self, check: str, what: str, why: str, do: str) -> None:
        """Note something to be mended."""
        self.findings.append(Finding(check, health.PROBLEM, what, why, do))

    def note(self, check: str, what: str, why: str, do: str) -> None:
        """Note something to be known."""
        self.findings.append(Finding(check, NOTE, what, why, do))


def doctor(args: argparse.Namespace) -> int:
    """Ask everything that is configured whether it is fit, and say what is not."""
    settings = _settings_of(args)
    url = settings.redis_url() if settings is not None and not args.redis else url_of(args)
    name = args.run or os.environ.get("ROLLSTREAM_RUN__NAME") or ""
    if settings is not None and not args.run:
        name = settings.run.name
    if args.ca is None and settings is not None and settings.redis.ca is not None:
        args.ca = str(settings.redis.ca)
    report = Report({"redis": shown_url(url)})
    engine = _scoring_engine(args, settings)
    run: tuple[RunInfo | None, list[EngineView]] = (None, [])
    try:
        with reached(args, url, name) as queue:
            _server(queue, report)
            report.findings += right_findings(queue, is_named=bool(name))
            if name:
                run = _run(queue, report)
            else:
                _every_run(args, url, queue, report)
                name = _only_name(args, report)
        if engine:
            with reached(args, url, name) as queue:
                _log_probs(queue, engine, args.logprobs, report)
    except CommandError as error:
        if error.code == USAGE:
            raise
        report.problem("reach", scrub(str(error)), "nothing works without Redis",
                       "Start it, or correct the URL, the user or the password")  # fmt: skip
    if settings is not None:
        _engines(settings, args, report, *run)
        _jobs(settings, url, args, report)
        _parts(settings, args, report)
    return _tell(report, args)


def _settings_of(args: argparse.Namespace) -> Settings | None:
    if args.config is None:
        return None
    try:
        from rollstream.config import load_settings

        return load_settings(["--config", args.config], prog="rollstream doctor").settings
    except ConfigError as error:
        raise CommandError(str(error), USAGE) from None
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--config needs {error.name!r}: pip install 'rollstream[service]'", USAGE
        ) from None


def _scoring_engine(args: argparse.Namespace, settings: Settings | None) -> str:
    """Return the engine that scores samples; empty where none are to be scored."""
    if args.logprobs is None:
        return ""
    urls = settings.engine.urls if settings is not None else ()
    engine = str(args.engine or (urls[0] if urls else ""))
    if not engine.startswith(("http://", "https://")):
        raise CommandError(
            "--logprobs needs an engine that scores: --engine http://host:port, or engine.urls in "
            "the file of --config",
            USAGE,
        )
    return engine


def _only_name(args: argparse.Namespace, report: Report) -> str:
    """Return the only run there is, where one is needed."""
    names = list(report.facts["runs"])
    if args.logprobs is not None and len(names) != 1:
        raise CommandError(f"--logprobs needs a run, name one: {', '.join(names) or 'none'}", USAGE)
    return names[0] if names else ""


# --- the server ----------------------------------------------------------------------------------
def _server(queue: BlockingQueue, report: Report) -> None:
    facts = health.facts_of(queue.ask(health.COMMANDS))
    now = time.time()
    trips: list[float] = []
    for _ in range(PINGS):
        started = time.perf_counter()
        queue.ask((("PING",),))
        trips.append((time.perf_counter() - started) * 1000)
    report.findings += health.judge(facts)
    report.findings += health.clock_finding(facts, now)
    report.findings += health.latency_finding(trips)
    used, limit = facts.number("used_memory"), facts.number("maxmemory")
    report.facts |= {
        "server": facts.name,
        "role": facts.text("role") or "unknown",
        "cluster": facts.text("cluster_enabled") == "1",
        "used_memory": used,
        "max_memory": limit,
        "policy": facts.text("maxmemory_policy") or "unknown",
        "append_only": {"1": "on", "0": "off"}.get(facts.text("aof_enabled"), "unknown"),
        "append_fsync": facts.config.get("appendfsync", "unknown"),
        "clock_distance_s": None if facts.unix_s is None else round(facts.unix_s - now, 3),
        "round_trip_ms": round(sorted(trips)[PINGS // 2], 2),
    }


# --- runs ----------------------------------------------------------------------------------------
def _every_run(args: argparse.Namespace, url: str, queue: BlockingQueue, report: Report) -> None:
    names = list_runs(queue.client)
    report.facts["runs"] = {}
    for name in names:
        one = queue_of(args, url, name)
        try:
            info = _read_info(one, report)
        finally:
            one.close()
        report.facts["runs"][name] = "unreadable" if info is None else info.state


def _read_info(queue: BlockingQueue, report: Report) -> RunInfo | None:
    """Return what a run is; None where it cannot be read, which is a finding, or is none."""
    remove = f"rollstream runs --remove {queue.run}"
    try:
        return queue.info()
    except RunMismatch as error:
        report.problem("schema", str(error), "this version can neither read nor feed it",
                       f"Use the release that opened it, or remove it: {remove}")  # fmt: skip
    except (ResponseError, LookupError, ValueError) as error:
        report.problem("schema", f"run {queue.run!r} cannot be read ({error})",
                       "its keys are damaged or another program's",
                       f"Remove it ({remove}); a checkpoint keeps its place")  # fmt: skip
    return None


def _run(queue: BlockingQueue, report: Report) -> tuple[RunInfo | None, list[EngineView]]:
    """Look at one run; return what it is, and its engines as its live workers see them."""
    found = len(report.findings)
    info = _read_info(queue, report)
    if info is None:
        if len(report.findings) == found:
            report.note(
                "run", str(no_run(queue, report.facts["redis"])),
                "nothing is trained before it exists",
                f"Start its producer: python -m producer --run.name {queue.run}",
            )  # fmt: skip
        return None, []
    audit = queue.call(calls.audit(deep=True))
    for problem in audit.problems:
        report.problem(
            "audit", f"the books of run {queue.run!r} do not add up: {problem}",
            "groups may be lost or trained twice",
            "Keep the server's data and report it; a checkpoint can begin a new run",
        )  # fmt: skip
    depths, alive = queue.depths(), alive_of(queue)
    report.facts["run"] = {
        "name": queue.run,
        "state": info.state,
        "enqueued": audit.enqueued,
        "acked": audit.acked,
        "dropped": audit.dropped,
        "live": audit.live,
        "alive": {role: len(names) for role, names in alive.items()},
        "trainer_connects": info.connects,
    }
    if info.state == "failed":
        report.problem("state", f"run {queue.run!r} has failed: {info.error or 'no reason given'}",
                       "nothing is leased any more", "Mend the cause, then abort it: its ids come "
                       "again in a new run with the trainer's checkpoint")  # fmt: skip
    if info.state in _ENDED:
        return None, []
    report.findings += _missing(info, depths, alive, audit.live)
    names = {name for of_role in alive.values() for name in of_role}
    report.facts["run"]["versions"], findings = version_findings(abouts_of(queue, names))
    report.findings += findings
    return info, confirmed.engine_views(confirmed.live(queue.confirmations(), info.lease_s))


def _log_probs(queue: BlockingQueue, engine: str, limit: int, report: Report) -> None:
    """Score finished samples again, and note what the comparison shows."""
    info = _read_info(queue, report)
    if info is None:
        return
    found = rescored(queue, info, engine, limit)
    report.facts["logprobs"] = found
    for problem in found["problems"]:
        report.problem("logprobs", problem, "the trainer's importance ratios are wrong by as much",
                       "Compare the engine's flags and weights with the trainer's; "
                       "docs/tokens.md, \"Watching it\"")  # fmt: skip
    if not found["compared"] and not found["problems"]:
        report.note("logprobs", "no position could be compared",
                    "this says nothing about the log-probs",
                    "Ask again while samples of the engine's version wait; only temperature 1 is "
                    "comparable with a prefill")  # fmt: skip


def _missing(
    info: RunInfo, depths: dict[str, int], alive: dict[str, list[str]], live: int
) -> Iterator[Finding]:
    """Yield the roles that are needed and have nobody."""
    undelivered = live - depths["delivered"]
    if not info.done and "producer" not in alive:
        yield Finding("roles", health.PROBLEM, "no producer is alive, and prompts are missing",
                      "the run stops when what is enqueued is used up",
                      f"python -m producer --run.name {info.run}")  # fmt: skip
    if undelivered > depths["full"] + depths["ready"] and "worker" not in alive:
        yield Finding("roles", health.PROBLEM, "no worker is alive, and samples wait",
                      "nothing is generated",
                      f"python -m worker --run.name {info.run}")  # fmt: skip
    if depths["full"] and "aggregator" not in alive:
        yield Finding("roles", health.PROBLEM,
                      f"no aggregator is alive, and {depths['full']} full groups wait",
                      "no group reaches the trainer",
                      "python -m worker --worker.role aggregator")  # fmt: skip
    if depths["ready"] and not info.connects:
        yield Finding("roles", NOTE, f"{depths['ready']} groups are ready and no trainer ever came",
                      "the producer stops within one capacity",
                      "Connect one: GroupStream.connect(url, run=…)")  # fmt: skip


# --- the configuration ---------------------------------------------------------------------------
def _engines(
    settings: Settings,
    args: argparse.Namespace,
    report: Report,
    info: RunInfo | None,
    views: list[EngineView],
) -> None:
    urls = settings.engine.urls if info is None or info.engines is None else info.engines
    words, findings = engine_findings(
        urls,
        settings.engine.kind,
        timeout_s=args.timeout_s,
        info=info,
        views=views,
        vllm_route=settings.engine.vllm_route,
    )
    report.facts["engines"] = words
    report.findings += findings


def _jobs(settings: Settings, url: str, args: argparse.Namespace, report: Report) -> None:
    envs = needs_verifier(settings)
    if not envs:
        return
    jobs = settings.rq.url.get_secret_value() if settings.rq.url is not None else url
    try:
        with reached(args, jobs, "") as queue:
            about: Any = queue.client.info("cluster")
            alive, missing = verifier_findings(queue, envs)
    except (CommandError, RedisError) as error:
        report.problem("rq", f"the server of isolated rewards' jobs: {scrub(str(error))}",
                       "their samples fail for want of a verdict",
                       "Start it, or correct rq.url")  # fmt: skip
        return
    if about.get("cluster_enabled"):
        report.problem("rq", f"{shown_url(jobs)} is a cluster", "RQ cannot use one for its jobs",
                       "Set rq.url to a server that is none")  # fmt: skip
        return
    report.facts["verifiers"] = "unknown" if alive is None else alive
    report.findings += missing


def _parts(settings: Settings, args: argparse.Namespace, report: Report) -> None:
    report.facts["tokenizer"], findings = tokenizer_findings(settings, args.config)
    report.findings += findings
    report.facts["exporter"], findings = exporter_findings(settings, args.timeout_s)
    report.findings += findings


# --- telling -------------------------------------------------------------------------------------
def _tell(report: Report, args: argparse.Namespace) -> int:
    problems = health.problems(report.findings)
    if args.json:
        print_json({"ok": not problems, "facts": report.facts,
                    "findings": [asdict(finding) for finding in report.findings]})  # fmt: skip
        return PROBLEM if problems else OK
    for name, value in _rows(report.facts):
        print_text(f"{name:<18} {value}")
    if "logprobs" in report.facts:
        print_text("\n" + "\n".join(table(report.facts["logprobs"])))
    for finding in report.findings:
        print_text(f"\n{finding.level}: {finding.what}\n  why: {finding.why}\n  do:  {finding.do}")
    print_text(f"\n{len(problems)} to be mended" if problems else "\nall is well")
    return PROBLEM if problems else OK


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if name == "logprobs":
            continue  # a table of its own
        if isinstance(value, dict):
            for inner, shown in value.items():
                yield f"{name} {inner}", shown
        elif name.endswith("_memory"):
            yield name.replace("_", " "), health.megabytes(value) if value else "no limit"
        else:
            yield name.replace("_", " "), value
