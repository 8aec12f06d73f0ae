"""The model that comes with refengine: ``model.gguf``, its card, the report of its training and its licence."""
