"""The search index: building, storing, searching, re-ranking and saying "unknown"."""
