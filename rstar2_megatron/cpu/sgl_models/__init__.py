"""The supported architectures. SGLang imports only these and starts 10 s sooner."""
