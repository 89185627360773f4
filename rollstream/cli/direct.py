"""How `doctor` asks engines and our own processes over HTTP: as workers do, without a proxy.

Owns the opener. Never reads `HTTP_PROXY`: what a proxy says of an engine is nothing that a worker
would hear.
"""

from __future__ import annotations

import urllib.request

open_direct = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
