"""Everything behind the tools: series machinery, server client, statistics, reports."""
