"""Code of the user that a YAML names. What such code may import from here is in this file."""


class ToolError(Exception):
    """Raised by an own tool: the model did something wrong. The message is shown to the model, which may try again."""
