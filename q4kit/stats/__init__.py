"""Pure statistics: floors, intervals, equivalence, detection power."""
