"""Networks that map images to vectors."""
