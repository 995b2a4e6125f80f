"""The programs of checks: on one rank, in one engine, on one node, or as a whole run."""
