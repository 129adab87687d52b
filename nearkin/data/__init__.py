"""Where images and labels come from, and how they are split by class."""
