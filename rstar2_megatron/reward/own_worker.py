"""A grading process of the user's reward functions: gets lists of trajectories over a pipe, replies score by score.

    python -m rstar2_megatron.reward.own_worker FILE_DESCRIPTOR

The first message names the functions and the memory that they may take.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection

from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.reward.own import OwnReward
from rstar2_megatron.services.parent_death import die_with_parent


def _limit(memory_mb: int) -> None:
    """Let the process take `memory_mb` more than it has now, with the user's libraries loaded."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = now + memory_mb * 1024**2
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    die_with_parent(signal.SIGKILL)  # a stuck process must not outlive the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    pipe = Connection(int(sys.argv[1]))
    named, memory_mb = pickle.loads(pipe.recv_bytes())
    try:
        functions = [OwnReward(code, arguments) for code, arguments in named]
    except UserCodeError as error:
        pipe.send_bytes(str(error).encode())
        return
    _limit(memory_mb)
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:  # the pool has closed
            return
        for problem, trajectory in pickle.loads(request):
            for function in functions:
                try:
                    score = function.score(function(problem, trajectory))
                except (Exception, SystemExit) as error:
                    score = function.failed(error)
                pipe.send_bytes(pickle.dumps(score))


if __name__ == "__main__":
    main()
