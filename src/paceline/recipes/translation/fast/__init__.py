"""A faster way to train a Transformer, on sentences without padding."""
