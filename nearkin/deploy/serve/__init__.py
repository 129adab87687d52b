"""The web server over an index: a page and a JSON API."""
