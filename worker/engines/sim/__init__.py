"""The simulated engine: SGLang's protocol, a scripted policy, faults on demand.

A stand-in for a model, not a model. `policy.Policy.expected` is the pure function that an auditor
recomputes; docs/sim.md states the contract.
"""
