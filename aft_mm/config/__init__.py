"""Configs: `finding.py` finds one by its name, `reading.py` reads and checks it."""
