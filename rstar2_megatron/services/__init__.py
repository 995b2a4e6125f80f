"""What a run starts beside itself: Redis, ports, temporary directories, and the end of processes."""
