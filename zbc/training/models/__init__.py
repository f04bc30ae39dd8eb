"""The layers of a model, built in or from a Hugging Face folder."""
