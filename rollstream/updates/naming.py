"""What engines call their weights: told to them before a push, behind it, and where it failed.

Owns the names that one stream gave and took back. Never moves a weight and knows no worker.
Invariant: whatever fails here, an engine never has a version's name without its weights by it; at
worst it keeps a name that means no version, and takes no calls until an update reaches it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from rollstream.labels import between
from rollstream.updates.engine_posts import get_all, post_all

log = logging.getLogger("rollstream.stream")

POST_TIMEOUT_S = 10.0
QUICK_TIMEOUT_S = 5.0
"""Of what is said while the run waits for the block to begin, or for a failed one to end."""
VERSION_PATH = "/update_weight_version"
LABEL_PATHS = ("/model_info", "/weight_info")
"""Where SGLang says its label, and vLLM in dev mode."""


class Naming:
    """The names of one stream's engines."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._silent: set[str] = set()
        """Engines of which it was said that they take no name."""
        self._before: dict[str, str | None] = {}
        """What the engines were called that have a name between two versions now."""

    def tell(self, engines: Sequence[str], label: str, version: int) -> int:
        """Say to every engine what its weights are called now; return how many did not take it.

        Such an engine is left: it reports another version then, or none, so workers give it no
        calls (`engine.require_version`).
        """
        self._before = {}
        refused = self._post(engines, label, POST_TIMEOUT_S)
        for url, error in refused.items():
            # Once an engine: one without the route would say so with every update.
            level = logging.DEBUG if url in self._silent else logging.WARNING
            text = "an engine did not take the weight version: %s"
            log.log(level, text, error, extra=self._about(url) | {"version": version})
        self._silent = (self._silent - set(engines)) | set(refused)
        return len(refused)

    def hide(self, engines: Sequence[str], old: int, new: int) -> None:
        """Give engines a name that means neither version, while calls go on and weights move.

        Their own replies then say which tokens nobody can know the weights of.
        """
        # Not the run's: an engine that began anew, or that an update left out, has another.
        self._before = dict.fromkeys(engines) | labels_of(engines)
        refused = self._post(engines, between(old, new), QUICK_TIMEOUT_S)
        for url, error in refused.items():
            level = logging.DEBUG if url in self._silent else logging.WARNING
            log.log(
                level,
                "an engine did not take a name for the time of the update (%s): what its calls in "
                "flight sample meanwhile counts as of the old version",
                error,
                extra=self._about(url),
            )
        self._silent |= set(refused)

    @property
    def is_hiding(self) -> bool:
        """Whether engines have a name between two versions."""
        return bool(self._before)

    def restore(self) -> None:
        """Call the engines what they were called before `hide`: their weights did not change."""
        before, self._before = self._before, {}
        by_label: dict[str, list[str]] = {}
        lost = {url: "it did not say it" for url, label in before.items() if label is None}
        for url, label in before.items():
            if label is not None:
                by_label.setdefault(label, []).append(url)
        for label, urls in by_label.items():
            lost |= self._post(urls, label, QUICK_TIMEOUT_S)
        for url, error in lost.items():
            if url not in self._silent:
                log.warning(
                    "an engine did not get its old label back (%s): it takes no calls until an "
                    "update reaches it",
                    error,
                    extra=self._about(url),
                )

    def leave(self, why: object) -> None:
        """Leave the engines with the name that means no version."""
        if self._before:
            log.warning(
                "engines keep a label that means no version (%s): they take no calls until an "
                "update reaches them",
                why,
                extra={"run": self._run, "engines": sorted(self._before)},
            )
        self._before = {}

    def _post(self, engines: Sequence[str], label: str, timeout_s: float) -> dict[str, str]:
        """Return who did not take a name → why."""
        body = {"new_version": label, "abort_all_requests": False}
        posted = post_all(engines, VERSION_PATH, body, timeout_s=timeout_s)
        return {one.url: one.error for one in posted if one.error}

    def _about(self, url: str) -> dict[str, object]:
        return {"run": self._run, "engine": url}


def labels_of(engines: Sequence[str]) -> dict[str, str]:
    """Return engine → its label, of those that say one."""
    found: dict[str, str] = {}
    left = list(engines)
    for path in LABEL_PATHS:
        asked = get_all(left, path, timeout_s=QUICK_TIMEOUT_S)
        found |= {one.url: label for one in asked if (label := _label_in(one.reply)) is not None}
        # Who does not answer at all is not waited for again.
        left = [one.url for one in asked if one.url not in found and one.is_answered]
    return found


def _label_in(reply: bytes) -> str | None:
    try:
        said = json.loads(reply)
    except ValueError:
        return None
    label = said.get("weight_version") if isinstance(said, dict) else None
    return label if isinstance(label, str) and label else None
