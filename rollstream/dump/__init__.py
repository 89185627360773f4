"""Finished groups in files: written beside or in place of a training, and trained on later.

Names what others use: `read_batches`, `read_groups` and `read_manifest`. Never imports redis.
Invariant: what is read is what was written, bit for bit, or a `WireError` that names file and byte.
"""

from __future__ import annotations

from rollstream.dump.format import Manifest, read_manifest
from rollstream.dump.reader import read_batches, read_groups

__all__ = ["Manifest", "read_batches", "read_groups", "read_manifest"]
