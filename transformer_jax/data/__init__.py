"""Data: sources of examples, vocabularies, objectives, the plan of every batch, and the pipelines which carry it out.

Stands on the ground floor: knows no model. Import the module which is needed; only `pipeline` loads Grain.
"""
