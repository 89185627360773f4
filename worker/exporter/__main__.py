"""`python -m worker.exporter [--table.key value]`: the exporter of one run.

Owns the order of imports. Never imports anything heavy before the configuration was read: `--help`
answers at once.
"""

from __future__ import annotations

import sys

from rollstream.config import Loaded, run_app


def main(loaded: Loaded) -> None:
    """Measure until SIGTERM."""
    from rollstream.logs import bind_process, configure

    from .app import run

    settings = loaded.settings
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    bind_process(run=settings.run.name)
    run(settings)


if __name__ == "__main__":
    name = __package__ or "worker.exporter"
    sys.exit(
        run_app(
            main, "rollstream exporter" if name.startswith("rollstream.") else f"python -m {name}"
        )
    )
