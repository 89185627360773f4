"""Make what the Kubernetes base has in common with Docker Compose: rules, run and server.

Owns `ops/k8s/generated/`. Never invents a rule: a PrometheusRule has the groups of
`ops/prometheus/rules`, and the two configurations are those of `ops/`, because kustomize reads
nothing outside its own folder. Invariant: the same files make the same output.

    python -m ops.manifests [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

OPS = Path(__file__).resolve().parent
RULES = OPS / "prometheus" / "rules"
GENERATED = OPS / "k8s" / "generated"
COPIED = ("rollstream.toml", "redis.conf")
NOTE = "# Made by ops/manifests.py from {source}: change that, and run it again.\n"


class _Text(str):
    """A text of several lines, which stays readable."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def prometheus_rule() -> str:
    """Return all groups of rules as one resource for the Prometheus operator."""
    groups = [
        group
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "rollstream",
            "labels": {
                "app.kubernetes.io/name": "rollstream",
                "app.kubernetes.io/part-of": "rollstream",
            },
        },
        "spec": {"groups": _readable(groups)},
    }
    text = yaml.dump(resource, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return NOTE.format(source="ops/prometheus/rules") + str(text)


def _readable(value: Any) -> Any:
    """Return the same with every text of several lines as a block."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, str) and "\n" in value.rstrip("\n"):
        return _Text(value)
    return value


def made() -> dict[Path, str]:
    """Return every file of `generated/` with what is to be in it."""
    files = {GENERATED / "prometheusrule.yaml": prometheus_rule()}
    for name in COPIED:
        note = NOTE.format(source=f"ops/{name}")
        files[GENERATED / name] = note + (OPS / name).read_text()
    return files


def main(argv: list[str]) -> int:
    """Write them; with `--check` say which are not what they should be, and write nothing."""
    parser = argparse.ArgumentParser(description="Make ops/k8s/generated.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where one is not current")
    check = parser.parse_args(argv).check
    files = made()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    left = sorted(set(GENERATED.glob("*")) - set(files)) if GENERATED.exists() else []
    if check:
        for path in stale + left:
            sys.stdout.write(f"{path}: not current: run python -m ops.manifests\n")
        return 1 if stale or left else 0
    GENERATED.mkdir(exist_ok=True)
    for path in left:
        path.unlink()
    for path in stale:
        path.write_text(files[path])
        sys.stdout.write(f"{path}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
