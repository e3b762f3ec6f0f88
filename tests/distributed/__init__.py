"""Tests on several ranks: real gloo processes from the one pool of `pool.py`."""
