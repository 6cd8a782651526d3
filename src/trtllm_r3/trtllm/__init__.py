"""The hooks in TensorRT-LLM. Nothing else in this package knows it, and nothing here imports it at import."""
