"""One training in the ways of many libraries: each function is what its user must write, and its lines are counted."""
