"""Checks by subject: each file lists its own as CHECKS."""
