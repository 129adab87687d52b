"""The search index: storage, search, calibration, re-ranking and updates."""
