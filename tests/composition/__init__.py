"""Several axes of the mesh at once."""
