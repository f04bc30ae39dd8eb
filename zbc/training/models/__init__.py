"""The layers of a model: built-in families, user factories, weights of a Hugging Face folder."""
