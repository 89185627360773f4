"""A pytest plugin: the scripts with one mutation, for the unit tests of a process of their own.

Loaded with `-p` before anything imports the scripts by name, so every bench gets the changed ones.
"""

from __future__ import annotations

import os
from types import MappingProxyType

from rollstream.queue import scripts
from tests.integration.queue.mutation_list import MUTATIONS, mutate

_name = os.environ.get("ROLLSTREAM_MUTATION", "")
_changed = scripts.load_scripts()
for _mutation in MUTATIONS:
    if _mutation.name == _name:
        _changed = MappingProxyType(mutate(_changed, _mutation))
scripts.load_scripts = lambda: _changed  # type: ignore[assignment]  # a plain function instead of the cached one
