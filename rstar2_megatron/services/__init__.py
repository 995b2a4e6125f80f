"""Services of a run on one machine: Redis, ports, temporary directories, ending processes."""
