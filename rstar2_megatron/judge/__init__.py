"""Code Judge: the service that runs the code a model invents, and its client."""
