"""The proof of promise 1 on a real model: what the trainer gets is what the engine sampled.

    python -m tests.e2e.fidelity --json

Rollouts with tools run over `worker.engines.hf` and the tiny model of `examples/tiny_model.py`: one
half through the whole service (Valkey, producer, workers, trainer), the other half through the
worker's own generate functions with aborts, resumes and new weights in the middle. Then every
sample is held against three witnesses: the bytes that went over HTTP, a teacher-forced forward pass
of plain transformers, and the merges of per-turn records. `--break WHAT` damages what the proof is
given, and must make it fail. docs/tokens.md says what is compared.
"""
