"""Attacks on the package with fixed seeds: kills, damaged files, hostile requests and archives. `make torture`."""
