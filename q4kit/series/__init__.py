"""Patch series: base, blob chains, apply, status, verify, export."""
