"""What every folder may use: atomic files and locks, progress, registries. Nothing here is public."""
