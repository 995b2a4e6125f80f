"""The architectures we train, one module each, so that SGLang imports these alone and starts 10 s sooner."""
