"""The web server of an index: a page and a JSON API."""
