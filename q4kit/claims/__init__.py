"""The ledger of published numbers and the check that documents quote it faithfully."""
