"""`--check`: one command that proves a machine before a night is spent on it."""
