"""An agent that lends its session to whoever measures: it writes its URL down, and waits.

Owns nothing else. Never calls its URL. Invariant: it ends when it is told to, or with its time.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from tests.e2e.agents.scenes import FOLDER

DONE, LOOK_S = "done", 0.05


async def run(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kw: Any
) -> dict[str, Any]:
    """Lend one session."""
    folder = Path(os.environ[FOLDER])
    (folder / f"url-{kw['sample_index']}.tmp").write_text(base_url)
    (folder / f"url-{kw['sample_index']}.tmp").rename(folder / f"url-{kw['sample_index']}")
    while not (folder / DONE).exists():
        await asyncio.sleep(LOOK_S)
    return {"reward": 0.0}
