"""The catalog: the only names there are, every value of every label, all of it from the start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.make_metrics import PAGE, page
from rollstream.errors import STATUS_OF, DropReason, MemberReason, StopReason
from rollstream.sample import SAMPLE_FIELDS
from tests.series import num_series
from worker.engines.fleet.states import State
from worker.telemetry import catalog
from worker.telemetry.catalog import CATALOG, NAMES, SERIES_NAMES, Bounded, Process, env_labels
from worker.telemetry.metrics import Metrics
from worker.telemetry.registry import Registry

ROOT = Path(__file__).parents[3]
ENVS = env_labels(["code", "maths", "search", "tools"], catalog.WORKER_ENV_LABELS)
NOT_METRICS = {*SAMPLE_FIELDS, "rollout_mask_sum", "rollout_bug", "rollout_func"}
"""Words of the same beginning: fields of a sample, a column of a batch, an event of the log, an
argument of TRL's."""


def families(registry: Registry) -> dict[str, str]:
    """Return the type of every metric as a scrape says it, by its name."""
    found = {}
    for family in text_string_to_metric_families(registry.render().decode()):
        # The parser of the older format takes the `_total` away, and calls an info a gauge.
        found[family.name + ("_total" if family.type == "counter" else "")] = family.type
    return found


@pytest.mark.parametrize("process", ["worker", "exporter"])
def test_a_scrape_shows_the_metrics_of_the_catalog_and_no_others(process: Process) -> None:
    registry = Registry(process, ENVS)
    registry.info("rollout_build_info", version="1", wire="1")
    kinds = {spec.name: spec.kind for spec in CATALOG if spec.process == process}
    assert families(registry) == kinds | {"rollout_build_info": "gauge"}


@pytest.mark.parametrize("process", ["worker", "exporter"])
def test_every_series_of_the_catalog_is_there_before_anything_happened(process: Process) -> None:
    registry = Registry(process, ENVS)
    shown = {
        (sample.name, tuple(sorted(sample.labels.items())))
        for metric in registry.prometheus.collect()
        for sample in metric.samples
    }
    for spec in CATALOG:
        if spec.process != process or spec.kind == "info":
            continue
        name = spec.name + ("_count" if spec.kind == "histogram" else "")
        for values in spec.children(ENVS):
            labels = tuple(sorted(zip(spec.labels, values, strict=True)))
            assert (name, labels) in shown, f"{name} {labels}"
    own = [spec for spec in CATALOG if spec.process == process]
    assert len(shown) == sum(spec.num_series(ENVS) for spec in own)


def test_a_worker_with_all_its_labels_has_at_most_400_series() -> None:
    given = Metrics(version="1.2", wire=1, envs=["code", "maths", "search"])
    assert num_series(given) == sum(spec.num_series(ENVS) for spec in catalog.WORKER)
    assert num_series(given) <= catalog.MAX_SERIES == 400
    assert len(ENVS) == catalog.WORKER_ENV_LABELS == 3


def test_buckets_reach_as_far_as_rollouts_do() -> None:
    assert catalog.spec_of("rollout_span_duration_seconds").buckets == (
        0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1200, 1800, 3600,
    )  # fmt: skip
    lengths = (64, 256, 1024, 4096, 16384, 65536, 262144)
    assert catalog.spec_of("rollout_sample_tokens").buckets == lengths
    for spec in CATALOG:
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert bool(spec.buckets) == (spec.kind == "histogram")


# --- closed enums --------------------------------------------------------------------------------
@pytest.mark.parametrize("reason", StopReason)
def test_every_way_to_end_has_a_child_in_every_environment(reason: StopReason) -> None:
    given = Metrics(version="1.2", wire=1, envs=["code", "maths"])
    for env in ("code", "maths", "never heard of"):
        given.sample_ended(env, reason, [], delivered=True)
    given.flush()
    for env in ("code", "maths", catalog.OTHER):
        labels = {"env": env, "status": STATUS_OF[reason].value, "reason": reason.value}
        value = given.registry.prometheus.get_sample_value("rollout_samples_total", labels)
        assert value == 1, labels


def test_every_reason_to_drop_and_to_fail_has_a_child_at_the_exporter() -> None:
    registry = Registry("exporter", ENVS)
    for reason in DropReason:
        assert registry.counter("rollout_groups_total", "code", "dropped", reason.value)
    assert registry.counter("rollout_groups_total", "code", "acked", "")
    assert set(registry.counters("rollout_members_failed_total")) == set(MemberReason)
    with pytest.raises(KeyError):
        registry.counter("rollout_groups_total", "code", "acked", "stale")


@pytest.mark.parametrize("drop", [None, *DropReason])
def test_every_verdict_is_counted_whatever_its_environment(drop: DropReason | None) -> None:
    given = Metrics(version="1.2", wire=1, envs=["code"])
    for env in ("code", "", "never heard of"):
        given.group_judged(env, drop)
    given.flush()
    outcome = "ready" if drop is None else "dropped"
    children = given.registry.by_labels("rollout_judged_groups_total")
    counts = {labels: child._value.get() for labels, child in children.items()}
    assert counts["code", outcome] == 1
    assert counts[catalog.OTHER, outcome] == 2
    assert sum(counts.values()) == 3


def test_states_of_engines_are_those_of_their_owner() -> None:
    assert catalog.spec_of("rollout_engines").labels["state"] == tuple(s.value for s in State)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ((), ("other",)),
        (("default",), ("default", "other")),
        (("b", "a"), ("a", "b", "other")),
        (("c", "b", "a"), ("a", "b", "other")),
        (("other", "z"), ("z", "other")),
    ],
)
def test_other_is_always_one_of_at_most_so_many_environments(
    names: tuple[str, ...], labels: tuple[str, ...]
) -> None:
    assert env_labels(names, 3) == labels


def test_no_label_can_carry_what_has_no_bound() -> None:
    for spec in CATALOG:
        for label, values in spec.labels.items():
            assert label not in {"le", "quantile", "job", "instance"}
            if values is Bounded.TEXT:
                assert spec.kind == "info", spec.name
            elif not isinstance(values, Bounded):
                assert len(values) == len(set(values)) <= 20, spec.name


# --- names elsewhere -----------------------------------------------------------------------------
def words() -> Iterator[tuple[str, str]]:
    """Yield every word that may be a metric, in pages and in what is shipped, and where it is."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    folders = [ROOT / name for name in ("ops", "benchmarks", "examples")]
    files = [path for folder in folders for path in sorted(folder.rglob("*"))]
    shipped = [path for path in files if path.is_file() and _is_text(path)]
    for path in (*pages, *shipped):
        for word in re.findall(r"(?<![\w:.])rollout_[a-z_]*[a-z](?!\w)", path.read_text()):
            yield word, str(path.relative_to(ROOT))


def _is_text(path: Path) -> bool:
    return path.suffix in {".md", ".yml", ".yaml", ".json", ".toml", ".conf", ".py"}


def test_pages_dashboards_and_rules_name_only_metrics_that_exist() -> None:
    known = NAMES | SERIES_NAMES | NOT_METRICS
    unknown = sorted({(word, where) for word, where in words() if word not in known})
    assert unknown == []
    assert sum(word in NAMES for word, _ in words()) > len(NAMES)


def test_the_page_of_metrics_is_what_the_catalog_says() -> None:
    assert PAGE.read_text() == page(), "python -m docs.make_metrics"


def test_the_catalog_is_read_without_any_package() -> None:
    heavy = ("prometheus_client", "numpy", "redis", "msgspec", "structlog", "pydantic", "asyncio")
    code = (
        "import sys, worker.telemetry.catalog; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
