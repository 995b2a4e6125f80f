"""The supported architectures, one module each. SGLang imports only these and starts 10 s sooner."""
