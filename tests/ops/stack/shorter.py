"""What Prometheus and Alertmanager read, with hours made minutes; never another rule or route.

Owns the factor, and what else must differ here: how often is scraped, ports, targets where no DNS
can be asked, and the place of Alertmanager's templates. Invariant: the rules are those that people
run, scaled by the function that is documented for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ops.prometheus.scaling import scaled

FACTOR = 1 / 60
"""An hour of the rules is a minute here."""
SCRAPE = "500ms"
"""Scrapes are far apart for the factor; every window has four of them all the same."""
REFRESH = "1s"
WAITS = {"group_wait": "100ms", "group_interval": "1s", "repeat_interval": "10m"}
"""How long Alertmanager gathers before it tells: of no say in whether an alert reaches it."""


def prometheus(
    file: Path, port: Callable[[int], int], written_down: Mapping[str, Sequence[str]]
) -> None:
    """Change a file of Prometheus in its place.

    Args:
        file: its configuration, a rule file, or any other one, which stays as it is.
        port: the local port for one of a container.
        written_down: targets of names that cannot be resolved here.
    """
    loaded = yaml.safe_load(file.read_text())
    if "scrape_configs" in loaded:
        for key in loaded["global"]:
            if key.endswith(("_interval", "_timeout")):
                loaded["global"][key] = SCRAPE
        for job in loaded["scrape_configs"]:
            _find(job, port, written_down)
        file.write_text(yaml.safe_dump(loaded))
    elif "groups" in loaded:
        file.write_text(yaml.safe_dump(scaled(loaded, FACTOR), width=1000))


def _find(
    job: dict[str, Any], port: Callable[[int], int], written_down: Mapping[str, Sequence[str]]
) -> None:
    """Have a job's names resolved here: by DNS where that can be, else by hand."""
    for found in job.get("dns_sd_configs", ()):
        found |= {"port": port(found["port"]), "refresh_interval": REFRESH}
    names = [name for found in job.get("dns_sd_configs", ()) for name in found["names"]]
    if names and written_down:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(written_down[name])} for name in names]


def alertmanager(file: Path) -> None:
    """Shorten the waits of Alertmanager's configuration, wherever in it they stand."""
    file.write_text(yaml.safe_dump(_sooner(yaml.safe_load(file.read_text()))))


def _sooner(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: WAITS.get(key) or _sooner(value) for key, value in settings.items()}
    return [_sooner(one) for one in settings] if isinstance(settings, list) else settings


def with_templates(program: Path, folder: Path) -> str:
    """Return an Alertmanager that finds its own templates in the folder that it is started in.

    Debian's looks for them in /usr/share and nowhere else, where only an installed package is.
    """
    own = b"/usr/share/prometheus/alertmanager"
    templates = program.parents[2] / own.decode().lstrip("/")
    if Path(own.decode()).is_dir() or not templates.is_dir():
        return str(program)
    for file in templates.glob("*.tmpl"):
        shutil.copy(file, folder)
    copy = folder / program.name
    copy.write_bytes(program.read_bytes().replace(own, b"./" * (len(own) // 2)))
    copy.chmod(0o755)
    return str(copy)
