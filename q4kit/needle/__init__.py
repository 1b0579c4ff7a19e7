"""Long-context retrieval with controls and bounds."""
