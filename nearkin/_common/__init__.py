"""Shared internals: atomic files and locks, processes, progress, registries, lazy exports. Nothing here is public."""
