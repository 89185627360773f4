"""Starts `worker`, `producer` and `exporter` by name, in this process.

Owns where an app lives: inside the wheel (`rollstream.apps.worker`), or beside this package in a
checkout (`worker`). Never imports one: runpy does, as `python -m` would. Invariant: a top-level
package of that name which is not ours is never run.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import rollstream
from rollstream.cli.exits import USAGE, CommandError
from rollstream.log_sink import say

_INSIDE = {"exporter": "worker.exporter"}
"""Apps that live inside the package of another."""


def run_app(name: str, argv: list[str]) -> int:
    """Run an app with `argv`, as `python -m` would; its exit code.

    Raises:
        CommandError: it is not installed, or what it needs is not.
    """
    module = find_app(name)
    sys.argv = [f"rollstream {name}", *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        return _code(end)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "rollstream", "worker", "producer"):
            raise
        raise CommandError(
            f"the {name} needs {missing!r}, which is not installed: "
            "pip install 'rollstream[service]'",
            USAGE,
        ) from None
    return 0


def find_app(name: str) -> str:
    """Return the module that `python -m` would be given.

    Raises:
        CommandError: there is none.
    """
    module = _INSIDE.get(name, name)
    package = module.partition(".")[0]
    installed = f"rollstream.apps.{module}"
    try:
        if find_spec(installed) is not None:
            return installed
    except ModuleNotFoundError:
        pass
    spec = find_spec(package)
    beside = Path(rollstream.__file__).resolve().parent.parent / package / "__init__.py"
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == beside:
        return module
    raise CommandError(
        f"there is no {name} here: install the wheel (pip install 'rollstream[service]'), or run "
        "from a checkout",
        USAGE,
    )


def _code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    say(str(end.code))
    return 1
