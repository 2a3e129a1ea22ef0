"""One training in the ways of many libraries. Each function is what its user must write; the report counts the lines."""
