"""Write docs/metrics.md from `worker.telemetry.catalog`: every metric there is.

Owns that page. Never names a metric that the catalog lacks.

    python -m docs.make_metrics          # rewrite docs/metrics.md
    python -m docs.make_metrics --check  # exit 1 where it differs
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from docs.pages import write_or_check
from worker.telemetry import catalog
from worker.telemetry.catalog import Bounded, Process, Spec, Values, env_labels

PAGE = Path(__file__).parent / "metrics.md"
_NAMED: dict[tuple[str, ...], str] = {
    catalog.STOP_REASONS: "stop reason",
    ("", *catalog.DROP_REASONS): "drop reason",
    catalog.MEMBER_REASONS: "member reason",
    catalog.REWARD_DETAILS: "detail",
    catalog.TOOL_OUTCOMES: "tool outcome",
    catalog.ENGINE_OUTCOMES: "engine outcome",
    catalog.QUEUES: "queue",
    catalog.SPANS: "span",
}
_HEAD = """# Metrics

<!-- made by docs/make_metrics.py from worker/telemetry/catalog.py -->

Each worker serves its own at `/metrics` (`telemetry.metrics_port`, 9400), the exporter those of the
run as a whole (`exporter.port`, 9401). Every series exists from the first scrape. A worker has at
most {most}, and {used} where all labels are in use. Names and labels are closed: no id, prompt,
URL, weight version or error text is a label, and an unknown value counts as `other`. Counters are
read with `rate` or `increase`.

**`env`** is the name of an environment. A worker has {worker_envs} such labels and the exporter
{exporter_envs}; the last is always `other`: what does not fit, and what no configuration names. So
of more than {named} environments a worker names the first {named} in alphabetical order; the
exporter's `rollout_groups_total` names the others, too.

**`kind`** is `all` or `delivered`: `all` has every trajectory that was completed or cut, whatever
became of its group, `delivered` those that the trainer gets. They are never added up.

**`engine`** is a place, `0` to `{last_engine}`, of the first engines of a worker; the next one
takes it when one has left. `rollout_engines` counts all.
"""
_SPANS_TEXT = """
Each span ends once, on success, error and cancellation alike; evaluations record none.

| span | from … to |
|---|---|
| `queue_wait` | the group was enqueued … this attempt was leased |
| `generate` | one engine call, with its retries and its waits for a pause; one a turn |
| `tool` | the tools of one turn; a step of an environment, its making and reset; an agent's own |
| `reward` | the reward of one trajectory; of a group, where one function scores all its members |
| `merge` | tokens, masks and text put together |
| `submit` | the result was handed over … Redis answered |
| `group_wait` | the member ended … the last one of its group did |

`ready_wait` (judged … handed out) is the trainer's: `batch.metrics()`. Spans that a user's own
function records under another name are added up in `rollout_other_span_seconds_total`, and kept in
the sample.
"""


def page() -> str:
    """Return the page."""
    envs = env_labels(map(str, range(catalog.WORKER_ENV_LABELS)), catalog.WORKER_ENV_LABELS)
    head = _HEAD.format(
        most=catalog.MAX_SERIES,
        used=sum(spec.num_series(envs) for spec in catalog.WORKER),
        worker_envs=catalog.WORKER_ENV_LABELS,
        exporter_envs=catalog.EXPORTER_ENV_LABELS,
        named=catalog.WORKER_ENV_LABELS - 1,
        last_engine=catalog.ENGINES[-1],
    )
    parts = [
        head,
        "## Of a worker\n",
        *_table("worker"),
        "\n## Of the run (exporter)\n",
        *_table("exporter"),
        "\n## Spans",
        _SPANS_TEXT,
        "## Buckets\n",
        *_buckets(),
        "\n## Label values\n",
        *_values(),
    ]
    return "\n".join(parts) + "\n"


def _table(process: Process) -> list[str]:
    rows = [_row(spec) for spec in catalog.CATALOG if spec.process == process]
    return ["| metric | type | labels | says |", "|---|---|---|---|", *rows]


def _row(spec: Spec) -> str:
    labels = ", ".join(_label(name, values) for name, values in spec.labels.items())
    return f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |"


def _label(name: str, values: Values) -> str:
    if isinstance(values, Bounded) or values == catalog.ENGINES or values == catalog.VIEWS:
        return f"`{name}`"
    if values in _NAMED:
        return f"`{name}`: [{_NAMED[values]}](#label-values)"
    return f"`{name}`: " + ", ".join(f"`{value}`" for value in values)


def _buckets() -> Iterable[str]:
    yield "| histogram | upper edges |"
    yield "|---|---|"
    for spec in catalog.CATALOG:
        if spec.buckets:
            edges = ", ".join(f"{edge:g}" for edge in spec.buckets)
            yield f"| `{spec.name}` | {edges} |"
    yield "\nEvery threshold of an alert is one of these edges."


def _values() -> Iterable[str]:
    yield "| label | values |"
    yield "|---|---|"
    shown = {name: values for values, name in _NAMED.items()}
    for name, values in shown.items():
        texts = ", ".join(f"`{value}`" if value else "empty (acked)" for value in values)
        yield f"| {name} | {texts} |"
    status = {
        status: [reason for _, kept, reason in _pairs() if kept == status]
        for status in catalog.STATUSES
    }
    yield (
        "\nThe status of a sample follows from its stop reason: "
        + "; ".join(
            f"`{name}`: {', '.join(f'`{reason}`' for reason in reasons)}"
            for name, reasons in status.items()
        )
        + "."
    )


def _pairs() -> list[tuple[str, ...]]:
    spec = catalog.spec_of("rollout_samples_total")
    return list(spec.children((catalog.OTHER,)))


def main(arguments: list[str]) -> None:
    """Rewrite or check the page."""
    write_or_check(PAGE, page(), arguments, "python -m docs.make_metrics")


if __name__ == "__main__":
    main(sys.argv[1:])
