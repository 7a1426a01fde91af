"""Pure functions on arrays, without parameters."""
