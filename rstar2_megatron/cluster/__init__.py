"""The only room that imports rlinf: cluster, placement, CPU slots, worker groups, channels."""

import os as _os

from rstar2_megatron.cluster import loopback as _loopback

# Ray reads its environment when it is first imported, so this must stand before any import of it.
if not _os.environ.get("RAY_ADDRESS"):
    for _name, _value in _loopback.environment().items():
        _os.environ.setdefault(_name, _value)
