"""An engine for a laptop, a test, or a GPU without SGLang: its `/generate`, over transformers.

Owns a real model and says exactly what it sampled. Never a fast engine: one process, one device,
plain PyTorch. Invariant: the log-prob of a sampled token is that of a forward pass over the tokens
before it, whoever else was in the batch, within float noise. docs/engines.md states the contract.
"""
