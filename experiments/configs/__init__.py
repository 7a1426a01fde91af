"""Experiments by name; each file's get_config() is what --config=FILE reads."""
