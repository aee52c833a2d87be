"""Whether gradients agree more where embeddings do."""
