"""Linen modules, one idea per file; they know nothing of training, search or meshes."""
