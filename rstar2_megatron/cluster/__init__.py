"""The only package that imports rlinf: cluster, placement, CPU slots, worker groups, channels."""

import os as _os
import secrets as _secrets

from rstar2_megatron.services import loopback as _loopback

# Ray and RLinf read their environment at import, so the variables are set before any import of them.
_os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
_os.environ.setdefault("RLINF_LOG_LEVEL", "WARNING")
# When several ranks fail alike, the first is raised (`calls`). Ray would print the tracebacks of the others behind that line.
_os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
if not _os.environ.get("RAY_ADDRESS"):  # a private head on loopback; an existing cluster has its own settings
    # Every account of the machine reaches loopback, and Ray runs what it is sent.
    _os.environ.setdefault("RAY_AUTH_MODE", "token")
    _os.environ.setdefault("RAY_AUTH_TOKEN", _secrets.token_hex(32))
    for _name, _value in _loopback.environment().items():
        _os.environ.setdefault(_name, _value)
