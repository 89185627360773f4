"""A whole run on one machine: prompts in, finished groups out, and a proof of what came out.

`python -m examples.demo` starts every process that a deployment has (a real Valkey, producer,
workers, verifier, and a stand-in for a model), trains on what comes, and audits it.
"""
