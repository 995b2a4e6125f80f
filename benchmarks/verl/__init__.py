"""A comparison with verl itself: its side of a configuration, runs of both side by side."""
