"""Serving one model on one machine: budget, profiles, checks before the start, and the server's life."""
