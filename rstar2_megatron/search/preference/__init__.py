"""rStar-Math's process preference model in a search: its training pairs, and its scores of prefixes."""
