"""Isolation: what may hang, crash or eat memory runs in a process of its own, through RQ.

Workers import `Isolated`; the verifier is `python -m worker.isolation.verifier`. Nothing here knows
of rewards or tools.
"""

from .client import Isolated, IsolatedFault
from .table import BUILT_IN

__all__ = ["BUILT_IN", "Isolated", "IsolatedFault"]
