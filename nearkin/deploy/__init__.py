"""A trained model put to use: an index of pictures, and search in it."""
