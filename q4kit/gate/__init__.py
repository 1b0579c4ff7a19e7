"""The per-patch gate: serve every prefix of the series and judge each patch by its neighbour (docs/GATE.md)."""
