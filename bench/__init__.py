"""Measures redbolt beside the floor of the machine and beside its peers: ``python -m bench``."""
