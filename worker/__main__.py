"""`python -m worker [--table.key value]`: one worker; `python -m worker doctor`: its checks alone.

Owns the order of imports at start: the tokenizer loads in a thread while the rest is imported,
which is most of what a start costs. Never configures anything itself.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING

from rollstream.config import Loaded, run_app
from rollstream.settings import Settings

if TYPE_CHECKING:
    from .tito.load import LoadedRenderer


def main(loaded: Loaded) -> None:
    """Run one worker until it is stopped or its run is over."""
    from rollstream.logs import bind_process, configure

    from .process.mainloop import run

    settings = loaded.settings
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    bind_process(run=settings.run.name)
    loading = None if settings.worker.role == "aggregator" else _load_in_thread(settings)
    run(_serve(settings, loading))


async def _serve(settings: Settings, loading: Future[LoadedRenderer] | None) -> None:
    from .process.app import Worker

    await Worker(settings, loading).run()


def _load_in_thread(settings: Settings) -> Future[LoadedRenderer]:
    future: Future[LoadedRenderer] = Future()

    def load() -> None:
        try:
            from .model import load_model

            future.set_result(load_model(settings.model))
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)

    # A daemon, so that an error found meanwhile does not wait for the vocabulary.
    Thread(target=load, name="load-tokenizer", daemon=True).start()
    return future


if __name__ == "__main__":
    if sys.argv[1:2] == ["doctor"]:
        from .doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    from .process.mainloop import leave

    leave(run_app(main, "python -m worker"))
