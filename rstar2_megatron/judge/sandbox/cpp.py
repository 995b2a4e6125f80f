"""C++ submissions: compiled inside the call's own isolation, then run in the same process."""

from __future__ import annotations

import os
import resource


def compiler() -> str | None:
    """Path of g++, or None: then `type: cpp` is invalid input."""
    places = (os.path.join(directory, "g++") for directory in os.get_exec_path())
    return next((place for place in places if os.access(place, os.X_OK)), None)


def build_and_run(source: str, cpu_seconds: int) -> int:
    """Compile `source` in the working directory and replace this process by the program, limited to `cpu_seconds`.

    Returns 1 when it does not compile.
    """
    with open("source.cpp", "w", encoding="utf-8") as file:
        file.write(source)
    g_plus_plus = compiler()
    if g_plus_plus is None:
        os.write(2, b"g++ is not installed on this worker\n")
        return 1
    command = [g_plus_plus, "-O2", "-std=c++17", "-o", "program", "source.cpp"]
    pid = os.posix_spawn(g_plus_plus, command, dict(os.environ))
    _, status = os.waitpid(pid, 0)
    if status != 0:
        return 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    os.execv("./program", ["program"])
