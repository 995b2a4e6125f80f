"""Contents of the trajectory page, a file a kind of row."""
