"""The PLE n-gram table on storage: convert and check tables, and measure the row readers against the disk."""
