"""The YAML's sections, one module per subject; `settings/schema.py` puts them together."""
