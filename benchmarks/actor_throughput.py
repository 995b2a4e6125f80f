"""`python -m benchmarks.actor_throughput` is `python -m benchmarks.actor.throughput`."""

from benchmarks.actor.throughput import main

if __name__ == "__main__":
    main()
