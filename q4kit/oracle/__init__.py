"""Teacher-forced logprobs before and after a change."""
