"""Single-stream speed, counted in tokens the server counted."""
