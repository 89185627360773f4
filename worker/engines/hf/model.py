"""The model: loaded from a folder, run forward, reloaded in place.

Owns the weights and what is read from the model's configuration. Never samples. Invariant: weights
change all at once or not at all: a folder that does not fit is refused before anything is copied.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import get_layer_types_and_kwargs

from rollstream.errors import ConfigError

from .folder import check_folder, eos_ids, read_json
from .kv import Kv, LoneKv, SlotKv
from .task import Experts

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_LOOSE = 5e-2
"""Of half-precision floats: how far (mean, relative) two ways to the same logits may differ."""


class Model:
    """One causal language model on one device.

    Attributes:
        path: the folder of the weights that it has now.
        kv: where the batch's keys and values lie.
    """

    def __init__(
        self, path: Path, *, device: str = "auto", dtype: str = "auto", batched: bool = True
    ) -> None:
        check_folder(path)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.path = path
        self.device = _device(device)
        self.dtype = _dtype(dtype, self.device, path)
        self._net = _load(path, self.dtype).to(self.device)
        self.config = self._net.config.get_text_config()
        parameters = inspect.signature(self._net.forward).parameters
        self._cache_word = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        self.eos_ids = eos_ids(path, self.config.eos_token_id)
        self.vocabulary_size = int(self.config.vocab_size)
        self.context_tokens = int(getattr(self.config, "max_position_embeddings", 0) or 32768)
        self._routed: list[Any] = []
        self._hook_routers()
        self.kv: Kv = self._choose_kv(batched)
        self.has_experts = self._num_routers() > 0

    @property
    def architecture(self) -> str:
        """The class of the network."""
        return type(self._net).__name__

    # -- forward

    def forward(
        self, ids: torch.Tensor, cache: Any, positions: torch.Tensor | None, mask: Any, keep: int
    ) -> torch.Tensor:
        """Return logits [B, keep, V] of the last positions."""
        words: dict[str, Any] = {self._cache_word: cache}
        if positions is not None:
            words["position_ids"] = positions
        if mask is not None:
            words["attention_mask"] = mask
        if self._keeps:
            words["logits_to_keep"] = keep
        self._routed.clear()
        logits: torch.Tensor = self._net(input_ids=ids, use_cache=cache is not None, **words).logits
        return logits[:, -keep:]

    def experts(self, num_rows: int) -> Experts:
        """Return which experts the last forward pass chose for its tokens, [N, layers, top_k].

        Layers without a router have zeros, as from SGLang.
        """
        top_k = max(chosen.shape[-1] for chosen in self._routed if chosen is not None)
        num_layers = int(self.config.num_hidden_layers)
        rows = np.zeros((num_rows, num_layers, top_k), dtype=np.int32)
        for layer, chosen in enumerate(self._routed):
            if chosen is not None:
                rows[:, layer, : chosen.shape[-1]] = chosen.reshape(num_rows, -1).cpu().numpy()
        return rows

    def _hook_routers(self) -> None:
        """Note the choice of every module that gives one: an integer tensor [tokens, top_k]."""
        for name, module in self._net.named_modules():
            if "router" in type(module).__name__.lower():
                layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
                if layer is not None:
                    module.register_forward_hook(self._router_hook(layer))

    def _router_hook(self, layer: int) -> Any:
        def note(_module: Any, _inputs: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple) else (output,):
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    self._routed.extend([None] * (layer + 1 - len(self._routed)))
                    self._routed[layer] = value.detach()

        return note

    def _num_routers(self) -> int:
        """Return how many layers said which experts they chose, by a forward pass of one token."""
        with torch.inference_mode():
            self.forward(torch.tensor([[0]], device=self.device), None, None, None, 1)
        return sum(chosen is not None for chosen in self._routed)

    # -- the batch

    def _choose_kv(self, batched: bool) -> Kv:
        """Return the batched cache if this model's own logits come out of it, else the lone one.

        Raises:
            ConfigError: they come out of neither.
        """
        if batched:
            try:
                slots = self._slots()
                self._prove(slots)
            except Exception as error:  # noqa: BLE001 - whatever it is, there is the other way
                reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
                sys.stderr.write(f"hf engine: one request at a time, no batches ({reason[0]})\n")
            else:
                return slots
        lone = LoneKv(self.forward, self.config, self.device)
        try:
            self._prove(lone)
        except Exception as error:  # noqa: BLE001 - a model that no cache of ours can run
            raise ConfigError(
                f"{self.path}: {self.architecture} cannot be run with a cache: {error}"
            ) from None
        return lone

    def _slots(self) -> SlotKv:
        kinds = set(get_layer_types_and_kwargs(self.config)[0])
        if kinds != {"full_attention"}:
            raise ValueError(f"layers of kind {', '.join(sorted(kinds))}")
        return SlotKv(
            self.forward,
            num_layers=int(self.config.num_hidden_layers),
            device=self.device,
            dtype=self.dtype,
            additive_mask=self.config._attn_implementation == "eager",
        )

    def _prove(self, kv: Kv) -> None:
        """Compare two requests, fed in by pieces, with what the model says of each as a whole.

        Raises:
            ValueError: they differ by more than rounding.
        """
        step = max(1, self.vocabulary_size // 23)
        prompts = [[(7 + step * i) % self.vocabulary_size for i in range(n)] for n in (11, 6)]
        with no_gradients():
            places = [kv.open() for _ in prompts]
            for place, prompt in zip(places, prompts, strict=True):
                kv.prefill(place, prompt[:4], 1)
                kv.prefill(place, prompt[4:-1], 1)
            last = [prompt[-1] for prompt in prompts]
            if kv.batched:
                got = list(kv.decode(places, last))
            else:
                got = [kv.decode([p], [i])[0] for p, i in zip(places, last, strict=True)]
            for place in reversed(places):
                kv.close(place)
            for logits, prompt in zip(got, prompts, strict=True):
                tokens = torch.tensor([prompt], device=self.device)
                alone = self.forward(tokens, None, None, None, 1)[0, 0].float()
                off = (logits.float() - alone).abs().mean() / alone.abs().mean().clamp(min=1e-9)
                if not float(off) <= _TOLERANCE.get(self.dtype, _LOOSE):
                    raise ValueError(f"logits out of the cache differ by {float(off):.1e}")

    # -- weights

    def reload(self, path: Path) -> None:
        """Take the weights of another folder, in place.

        Raises:
            ConfigError: it does not fit; the weights are the old ones.
        """
        check_folder(path)
        with torch.inference_mode(False), torch.no_grad():
            self._reload(path)

    def _reload(self, path: Path) -> None:
        net = _load(path, self.dtype)
        _check_same(path, self._net.config.to_dict(), net.config.to_dict())
        new = net.state_dict()
        held = self._net.state_dict()
        if {n: t.shape for n, t in new.items()} != {n: t.shape for n, t in held.items()}:
            raise ConfigError(f"{path} has parameters of other shapes than the model")
        for name, tensor in held.items():
            tensor.copy_(new[name])
        self.path = path

    def free_memory(self) -> None:
        """Give back what the allocator holds."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_same(path: Path, held: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse weights of another network: shapes alone do not tell tied weights or a rotary base.

    Raises:
        ConfigError: with what differs first.
    """
    for key in sorted({*held, *new}):
        if isinstance(held.get(key), dict) and isinstance(new.get(key), dict):
            _check_same(path, held[key], new[key])
        elif key not in _NOT_THE_NETWORK and held.get(key) != new.get(key):
            raise ConfigError(
                f"{path}: config.json says {key} {new.get(key)!r}, the model has {held.get(key)!r}"
            )


_NOT_THE_NETWORK = frozenset(
    "_name_or_path architectures dtype torch_dtype transformers_version use_cache "
    "eos_token_id bos_token_id pad_token_id initializer_range attention_dropout "
    "router_aux_loss_coef output_router_logits output_attentions output_hidden_states "
    "return_dict problem_type id2label label2id chunk_size_feed_forward".split()
)
"""Keys of a configuration that change no logits."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "not enough memory" in text or "can't allocate memory" in text
    )


@contextmanager
def no_gradients() -> Iterator[None]:
    """Run without autograd."""
    with torch.inference_mode():
        yield


def set_threads(num: int) -> None:
    """Use so many threads for one operation; 0 leaves PyTorch's choice."""
    if num > 0:
        torch.set_num_threads(num)


def _load(path: Path, dtype: torch.dtype) -> Any:
    """Return the network of a folder, on the CPU.

    Raises:
        ConfigError: it cannot be read, or weights are missing.
    """
    words: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        try:
            net, info = load(path, attn_implementation="sdpa", **words)
        except ValueError as error:
            if "attn" not in str(error) and "scaled_dot_product" not in str(error):
                raise
            net, info = load(path, attn_implementation="eager", **words)
    except Exception as error:  # noqa: BLE001 - every library below raises its own kind
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} cannot be loaded: {line}") from None
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(kind, ()))
        if names:
            raise ConfigError(f"{path}: {kind.replace('_', ' ')}: {', '.join(names[:3])}")
    return net.eval().requires_grad_(False)


def _device(name: str) -> Any:
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def _dtype(name: str, device: Any, path: Path) -> Any:
    """Return the type of the weights; auto is float32 on a CPU, the checkpoint's own elsewhere."""
    if name == "auto":
        config = read_json(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        if device.type == "cpu" or name not in ("float32", "bfloat16", "float16"):
            name = "float32"
    return getattr(torch, name)
