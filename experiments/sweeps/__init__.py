"""Sweeps by name; each file's get_sweep() is what --sweep=NAME reads. The base is experiments/configs/ablation.py."""
