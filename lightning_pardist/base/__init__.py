"""The ground floor: axis names, errors, logging, and the private torch names that need no process group."""
