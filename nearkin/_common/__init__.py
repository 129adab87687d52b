"""Shared internals: atomic files and locks, progress, registries, lazy exports. Nothing here is public."""
