"""The block interfaces of three seed systems: `cyberslm`, `slm` and `core`, each a module with that system's names.

A training script written against one of them runs by changing its import line. All are thin adapters over modicum's one
attention, feed-forward, norm and rotation; live weights lie in the dialect's own rotary layout, so its state dicts go
in and out bit for bit. Files are exchange's affair.
"""
