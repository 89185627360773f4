"""Inference engines: one client per protocol, and a pool that hides which one answers.

`create_engine` is the way in. Nothing heavy is imported before it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.settings import Settings

    from .fleet.pool import EnginePool


def create_engine(settings: Settings, *, max_token_id: int) -> EnginePool:
    """Return the engines of `[engine]`; inside a running event loop, without any I/O yet.

    Args:
        settings: `engine`, `debug.wire_dir`, and `model` where replay rows are asked for.
        max_token_id: the highest id of the vocabulary; a reply with a higher one is a fault.

    Raises:
        ConfigError: no URL, one that is none, or the same twice; replay rows of unknown shape;
            samples to score again by engines that score nothing.
    """
    from rollstream.errors import ConfigError

    from .fleet.pool import EnginePool, RetryPolicy
    from .protocol.replay import replay_shape
    from .protocol.vllm import UNSCORED

    engine = settings.engine
    if engine.kind == "vllm" and settings.telemetry.rescore_fraction > 0:
        raise ConfigError(f"engine.kind is 'vllm': {UNSCORED}")
    policy = RetryPolicy(
        max_retries=engine.max_retries,
        backoff_s=engine.retry_backoff_s,
        backoff_max_s=engine.retry_backoff_max_s,
        request_timeout_s=engine.request_timeout_s,
        connect_timeout_s=engine.connect_timeout_s,
        abort_wait_s=engine.abort_wait_s,
        probe_interval_s=engine.probe_interval_s,
        discover_interval_s=engine.discover_interval_s,
        max_in_flight=engine.max_in_flight,
        retry_budget=engine.retry_budget,
        require_version=engine.require_version,
    )
    return EnginePool(
        engine.urls,
        max_token_id=max_token_id,
        kind=engine.kind,
        policy=policy,
        wire_dir=settings.debug.wire_dir,
        replay=replay_shape(settings),
        lora_path=engine.lora_path,
        model=engine.model,
        vllm_route=engine.vllm_route,
        check_logprobs=True,
        scaled=samples_scaled(settings),
    )


def samples_scaled(settings: Settings) -> bool:
    """Return whether an environment samples at a temperature at which raw log-probs are wrong.

    Temperature 0 is the most likely token, whose log-prob engines give for T = 1.
    """
    flat = settings.sampling.temperature
    own = (table.sampling.get("temperature", flat) for table in settings.envs().values())
    return any(temperature not in (0, 1) for temperature in own)
