"""The report of a run: one self-contained page, its plots as PNG files, and a JSON file of every figure."""
