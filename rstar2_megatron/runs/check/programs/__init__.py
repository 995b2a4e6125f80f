"""What processes of a check run: on one rank, in one engine, on one node, or as a whole run."""
