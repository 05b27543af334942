"""One forward pass of a batch, and the activations of every layer on its way."""
